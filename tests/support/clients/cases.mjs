// What clients of JavaScript do with a server of the scripted model: `node cases.mjs URL CASE`, in a folder that has the
// packages of package.json. Each is as it comes: no option but address, key and model.
import assert from 'node:assert'
import Anthropic from '@anthropic-ai/sdk'
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { embedMany, experimental_decide as decide, generateObject, generateText, jsonSchema, stepCountIs, streamObject, streamText, tool } from 'ai'
import { Ollama } from 'ollama'
import OpenAI from 'openai'

const model = 'scripted'
const PLAIN = 'One two STOP three'
const object = (properties) => ({ type: 'object', properties, required: Object.keys(properties), additionalProperties: false })
const ZONE = object({ zone: { type: 'string' } })
const PLACE = object({ open: { type: 'boolean' } })
const FUNCTION = { name: 'now', description: 'The time.', parameters: ZONE }
const tools = [{ type: 'function', function: FUNCTION }]
const say = (content) => [{ role: 'user', content }]
const isPlace = (text) => assert.equal(typeof JSON.parse(text).open, 'boolean')

async function ai(url, language, reasons) {
  const asked = { model: language, temperature: 0, maxOutputTokens: 60, maxRetries: 0 }
  assert.equal((await generateText({ ...asked, prompt: '[plain]' })).text, PLAIN)
  const stream = streamText({ ...asked, prompt: '[reason]' })
  let text = ''
  for await (const piece of stream.textStream) text += piece
  assert.equal(text.trim(), 'It is so é 日.')
  if (reasons) assert.match(await stream.reasoningText, /Is it so/)
  const now = tool({ description: 'The time.', inputSchema: jsonSchema(ZONE), execute: async () => '[plain]' })
  const answer = await generateText({ ...asked, prompt: '[call]', tools: { now }, stopWhen: stepCountIs(2) })
  assert.deepEqual(answer.steps[0].toolCalls[0].input, { zone: 'UTC' })
  assert.equal(answer.text, PLAIN)
  const called = streamText({ ...asked, prompt: '[call]', tools: { now } })
  await called.consumeStream()
  assert.deepEqual((await called.toolCalls)[0].input, { zone: 'UTC' })
  const schema = jsonSchema(PLACE)
  assert.equal(typeof (await generateObject({ ...asked, prompt: 'x', schema })).object.open, 'boolean')
  const streamed = streamObject({ ...asked, prompt: 'x', schema })
  for await (const _ of streamed.partialObjectStream);
  assert.equal(typeof (await streamed.object).open, 'boolean')
}

const CASES = {
  async openai(url) {
    const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none' })
    const chat = { model, temperature: 0, max_tokens: 60 }
    const stream = client.chat.completions.stream({ ...chat, messages: say('[call]'), tools })
    const [call] = (await stream.finalMessage()).tool_calls
    assert.deepEqual(JSON.parse(call.function.arguments), { zone: 'UTC' })
    const form = { type: 'json_schema', json_schema: { name: 'place', schema: PLACE, strict: true } }
    const answer = await client.chat.completions.create({ ...chat, messages: say('x'), response_format: form })
    isPlace(answer.choices[0].message.content)
    const asked = { model, temperature: 0, max_output_tokens: 60 }
    const tool = { type: 'function', ...FUNCTION, strict: true }
    const events = client.responses.stream({ ...asked, input: '[call]', tools: [tool] })
    let snapshot = ''
    events.on('response.function_call_arguments.delta', (event) => { snapshot = event.snapshot })
    assert.equal((await events.finalResponse()).output.at(-1).arguments, snapshot)
    const format = { type: 'json_schema', name: 'place', schema: PLACE, strict: true }
    isPlace((await client.responses.create({ ...asked, input: 'x', text: { format } })).output_text)
    assert.equal((await client.embeddings.create({ model, input: ['a', 'b'] })).data.length, 2)
  },
  async anthropic(url) {
    const client = new Anthropic({ baseURL: url, apiKey: 'none' })
    const asked = { model, temperature: 0, max_tokens: 60 }
    assert.equal((await client.messages.create({ ...asked, messages: say('[plain]') })).content.at(-1).text, PLAIN)
    const given = [{ name: 'now', input_schema: ZONE }]
    const stream = client.messages.stream({ ...asked, messages: say('[call]'), tools: given })
    assert.deepEqual((await stream.finalMessage()).content.at(-1).input, { zone: 'UTC' })
    const output_config = { format: { type: 'json_schema', schema: PLACE } }
    isPlace((await client.messages.create({ ...asked, messages: say('x'), output_config })).content.at(-1).text)
    assert((await client.messages.countTokens({ model, messages: say('x') })).input_tokens)
    assert((await client.models.list()).data.length)
  },
  async ollama(url) {
    const client = new Ollama({ host: url })
    const asked = { model, options: { temperature: 0, num_predict: 60 } }
    let text = ''
    for await (const line of await client.chat({ ...asked, messages: say('[plain]'), stream: true })) text += line.message.content
    assert.equal(text, PLAIN)
    const { message } = await client.chat({ ...asked, messages: say('[call]'), tools })
    assert.deepEqual(message.tool_calls[0].function.arguments, { zone: 'UTC' })
    isPlace((await client.chat({ ...asked, messages: say('x'), format: PLACE, think: false })).message.content)
    assert.equal((await client.generate({ ...asked, prompt: '[plain]' })).response, PLAIN)
    assert.equal((await client.embed({ model, input: ['a', 'b'] })).embeddings.length, 2)
    assert((await client.list()).models.length && (await client.show({ model })).capabilities.length)
  },
  async ai_openai(url) {
    const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: 'none' })
    await ai(url, openai(model), false) // by Responses, whose reasoning it reads where a summary is asked for
    await ai(url, openai.chat(model), false)
    const { embeddings } = await embedMany({ model: openai.textEmbeddingModel(model), values: ['a', 'b'] })
    assert.equal(embeddings.length, 2)
  },
  async ai_decisions(url) {
    const decider = createOpenAI({ baseURL: `${url}/v1`, apiKey: 'none' }).decisionModel(model)
    const questions = {
      urgent: { type: 'boolean', instructions: 'Is it urgent?', criteria: { true: 'A date is near.' } },
      kind: { type: 'choice', instructions: 'What is it?', criteria: { bill: 'a bill', letter: null } },
      tone: { type: 'score', instructions: 'How kind is it?', criteria: ['rude', null, 'warm'] },
    }
    for (const state of ['Pay by noon.', { subject: 'noon', lines: [1, 2] }]) {
      const { answers: { urgent, kind, tone } } = await decide({ model: decider, state, questions, maxRetries: 0 })
      assert(urgent.probability > 0 && urgent.probability < 1)
      assert.equal(kind.choice, kind.probabilities.bill >= kind.probabilities.letter ? 'bill' : 'letter')
      const mean = Object.entries(tone.probabilities).reduce((sum, [level, share]) => sum + level * share, 0)
      assert(Math.abs(tone.score - mean) < 1e-6)
    }
  },
  async ai_openai_compatible(url) {
    const flags = { supportsStructuredOutputs: true, includeUsage: true }
    await ai(url, createOpenAICompatible({ name: 'octavo', baseURL: `${url}/v1`, apiKey: 'none', ...flags }).chatModel(model), true)
  },
  async ai_anthropic(url) {
    await ai(url, createAnthropic({ baseURL: `${url}/v1`, apiKey: 'none' })(model), true)
  },
}

await CASES[process.argv[3]](process.argv[2])
