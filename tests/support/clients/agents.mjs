// Agents of the AI SDK at work with a reciting model, whole and streamed: `node agents.mjs URL NAME`, in a folder that has
// the packages of package.json, with what loops.py tells of a loop on standard input. Each is told address, key and model.
import assert from 'node:assert'
import { json } from 'node:stream/consumers'
import { isDeepStrictEqual } from 'node:util'
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { generateText, jsonSchema, stepCountIs, streamText, tool } from 'ai'

const BLOCK = 16 // tokens; one that is not full is not kept
const [url, name] = process.argv.slice(2)
const { model, system, error, question, turns } = await json(process.stdin)
const reached = { baseURL: `${url}/v1`, apiKey: 'none' }
const openai = createOpenAI(reached)
const summary = { openai: { reasoningSummary: 'auto', forceReasoning: true } }
// `thoughts`: whether it tells of them and sends them back
const AGENTS = {
  ai_chat: { model: openai.chat(model), thoughts: false },
  ai_responses: { model: openai(model), thoughts: true, providerOptions: summary },
  ai_compatible: { model: createOpenAICompatible({ name: 'octavo', includeUsage: true, ...reached }).chatModel(model), thoughts: true },
  ai_anthropic: { model: createAnthropic(reached)(model), thoughts: true },
}

const told = turns.flatMap(({ calls, results }) => calls.map((call, at) => [call, results[at]]))
let run = []

function offered(named, description, properties) {
  const required = Object.keys(properties)
  const inputSchema = jsonSchema({ type: 'object', properties, required, additionalProperties: false })
  const execute = async (input) => {
    run.push([named, input])
    const [, result] = told.find(([call]) => isDeepStrictEqual(call, [named, input]))
    if (result === null) throw new Error(error)
    return result
  }
  return tool({ description, inputSchema, execute })
}

const { thoughts, ...agent } = AGENTS[name]
const tools = {
  look: offered('look', 'Read a page.', { page: { type: 'string' } }),
  count: offered('count', 'Count a word.', { word: { type: 'string' }, times: { type: 'integer' } }),
}
const asked = { ...agent, instructions: system, prompt: question, tools, stopWhen: stepCountIs(20), maxRetries: 0 }

function check(text, steps) {
  const pairs = (turn) => turn.calls.map((call) => JSON.stringify(call)).sort()
  assert.equal(text.trim(), turns.at(-1).text)
  assert.deepEqual(steps.map((step) => step.text.trim()), turns.map((turn) => turn.text))
  assert.deepEqual(steps.map((step) => step.toolCalls.map((call) => [call.toolName, call.input])), turns.map((turn) => turn.calls))
  assert.deepEqual(run.map((call) => JSON.stringify(call)).sort(), turns.flatMap(pairs).sort())
  const called = steps.flatMap((step) => step.toolCalls.map((call) => call.toolCallId))
  assert.equal(new Set(called).size, called.length)
  if (thoughts) assert.deepEqual(steps.map((step) => step.reasoningText?.trim()), turns.map((turn) => turn.thought))
  steps.slice(1).forEach(({ usage }, at) => {
    const { inputTokens, outputTokens } = steps[at].usage
    const cached = usage.inputTokenDetails.cacheReadTokens ?? 0
    const known = inputTokens + (thoughts ? outputTokens : 0)
    assert(usage.inputTokens > cached && cached >= known - BLOCK, JSON.stringify(steps.map((step) => step.usage)))
  })
}

const whole = await generateText(asked)
check(whole.text, whole.steps)
run = []
const stream = streamText({ ...asked, onError: ({ error }) => { throw error } })
let pieces = ''
for await (const piece of stream.textStream) pieces += piece
const steps = await stream.steps
assert.equal(pieces, steps.map((step) => step.text).join(''))
check(await stream.text, steps)
