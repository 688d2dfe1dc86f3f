-- A gateway's part of a request, before its key is made: who asks, for which model, and so which pool answers. Lists of
-- models, and what is asked of a gateway alone, are answered here. Stands behind key.lua; SETTINGS stand above.
-- Models and tenants' keys are files of their own, looked at once a second, models also when somebody names none of
-- them: a change disturbs no connection.
local format, gsub, match = string.format, string.gsub, string.match
local ror = bit.ror
-- What is passed on, when it names a model: nothing else, however it is written. Engines have more than tenants may use.
local PASSED = {
  ["/v1/chat/completions"] = true, ["/v1/completions"] = true, ["/v1/responses"] = true,
  ["/v1/responses/input_tokens"] = true, ["/v1/responses/compact"] = true, ["/v1/messages"] = true,
  ["/v1/messages/count_tokens"] = true, ["/v1/embeddings"] = true, ["/v2/embed"] = true, ["/v1/rerank"] = true,
  ["/rerank"] = true, ["/v2/rerank"] = true, ["/v1/score"] = true, ["/score"] = true, ["/classify"] = true,
  ["/tokenize"] = true, ["/detokenize"] = true, ["/api/show"] = true, ["/api/chat"] = true, ["/api/generate"] = true,
  ["/api/embed"] = true, ["/api/embeddings"] = true, ["/infill"] = true, ["/v1/decisions"] = true,
}
local OPEN = {["/"] = true, ["/health"] = true, ["/livez"] = true, ["/readyz"] = true, ["/ping"] = true}
local KINDS = {
  [400] = {"invalid_request_error", "invalid_request_error"}, [401] = {"authentication_error", "authentication_error"},
  [404] = {"invalid_request_error", "not_found_error"},
}
local NO_KEY = "Send a valid API key: Authorization: Bearer KEY, X-Api-Key: KEY or Api-Key: KEY"
local LOOK_MS, MISS_MS = 1000, 100  -- between two looks at files; at models, when somebody names none of them
local state = {checked = 0, read = 0, models = {}, names = {}, largest = {}, keys = {}, texts = {}}

local function content(path)
  local file = io.open(path, "rb")
  if not file then return nil end
  local text = file:read("*a")
  file:close()
  return text
end

local ROUND = {}  -- SHA-256's constants: the first bits of the cube roots of the first primes
do
  local n = 2
  while #ROUND < 64 do
    local prime = true
    for divisor = 2, math.floor(math.sqrt(n)) do prime = prime and n % divisor ~= 0 end
    if prime then ROUND[#ROUND + 1] = bit.tobit(math.floor((n ^ (1 / 3) % 1) * 2 ^ 32)) end
    n = n + 1
  end
end

local function sha256(text)
  local h = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}
  local bits = #text * 8
  text = text .. "\128" .. string.rep("\0", (55 - #text) % 64) .. "\0\0\0\0" ..
    char(rshift(bits, 24), band(rshift(bits, 16), 255), band(rshift(bits, 8), 255), band(bits, 255))
  local w = {}
  for chunk = 1, #text, 64 do
    for i = 1, 16 do
      local a, b, c, d = byte(text, chunk + 4 * i - 4, chunk + 4 * i - 1)
      w[i] = lshift(a, 24) + lshift(b, 16) + lshift(c, 8) + d
    end
    for i = 17, 64 do
      local x, y = w[i - 15], w[i - 2]
      w[i] = bit.tobit(w[i - 16] + w[i - 7] + bxor(ror(x, 7), ror(x, 18), rshift(x, 3)) +
        bxor(ror(y, 17), ror(y, 19), rshift(y, 10)))
    end
    local a, b, c, d, e, f, g, z = unpack(h)
    for i = 1, 64 do
      local one = z + bxor(ror(e, 6), ror(e, 11), ror(e, 25)) + bxor(band(e, f), band(bit.bnot(e), g)) + ROUND[i] + w[i]
      local two = bxor(ror(a, 2), ror(a, 13), ror(a, 22)) + bxor(band(a, b), band(a, c), band(b, c))
      z, g, f, e, d, c, b, a = g, f, e, bit.tobit(d + one), c, b, a, bit.tobit(one + two)
    end
    for i, value in ipairs({a, b, c, d, e, f, g, z}) do h[i] = bit.tobit(h[i] + value) end
  end
  for i = 1, 8 do h[i] = bit.tohex(h[i]) end
  return table.concat(h)
end

local function read_models(now)
  state.read = now
  local text = content(SETTINGS.models)
  if text and text ~= state.text then
    local read = loadstring(text)
    if read then
      state.text, state.models, state.names, state.largest = text, read(), {}, {}
      for _, model in ipairs(state.models) do state.names[model.name] = model end
    end
  end
end

local function look_again(handle)
  local now = handle:timestamp()  -- milliseconds
  if now - state.checked < LOOK_MS then return end
  state.checked = now
  read_models(now)
  local keys = {}
  for _, tenant in ipairs(SETTINGS.tenants) do
    local key = match(content(tenant.key_file) or "", "^%s*(.-)%s*$")
    if key ~= "" and state.texts[tenant.name] ~= key then
      state.texts[tenant.name] = key
      -- Nobody can make these up who does not know the key: the engine can be reached beside the gateway, too.
      tenant.id = sha256("octavo-tenant-id\0" .. tenant.name .. "\0" .. key)
      tenant.salt = tenant.isolated and sha256("octavo-cache-salt\0" .. tenant.name .. "\0" .. key)
    end
    if key ~= "" and not keys[key] then keys[key] = tenant end
  end
  state.keys = keys
end

local function quoted(text)
  return '"' .. gsub(text, '[%c"\\]', function(c) return format("\\u%04x", byte(c)) end) .. '"'
end

-- What a client has sent, for a message: its bytes may be anything.
local function shown(text) return "'" .. gsub(sub(text, 1, 200), "[^\32-\126]", "?") .. "'" end

local function tagged(name) return find(name, ":[^/]*$") and name or name .. ":latest" end

local function is_anthropic(ask) return find(ask.path, "/v1/messages", 1, true) == 1 or ask.anthropic end

local function answer(ask, status, body, headers)
  headers = headers or {}
  headers[":status"], headers["content-type"] = tostring(status), headers["content-type"] or "application/json"
  ask.handle:respond(headers, body)
end

local function refuse(ask, status, code, message, param)
  local kind = KINDS[status]
  local body
  if find(ask.path, "/api/", 1, true) == 1 then
    body = format('{"error":%s}', quoted(message))
  elseif is_anthropic(ask) then
    body = format('{"type":"error","error":{"type":"%s","message":%s}}', kind[2], quoted(message))
  else
    body = format('{"error":{"message":%s,"type":"%s","param":%s,"code":"%s"}}', quoted(message), kind[1],
      param and quoted(param) or "null", code)
  end
  answer(ask, status, body, status == 401 and {["www-authenticate"] = "Bearer"} or nil)
end

local function allowed(ask, model)
  local models = ask.tenant and ask.tenant.models
  return not models or models[model.name]
end

local function named(name) return state.names[name] or state.names[match(name, "^(.*):latest$")] end

local function model_of(ask, name)
  local found = named(name)
  if not found and ask.handle:timestamp() - state.read >= MISS_MS then  -- another thread may list it already
    read_models(ask.handle:timestamp())
    found = named(name)
  end
  return found and allowed(ask, found) and found or nil
end

-- Bytes of a body that one of the models takes which the request may name.
local function largest(ask)
  local whose, found = ask.tenant and ask.tenant.name or "", 0
  if state.largest[whose] then return state.largest[whose] end
  for _, model in ipairs(state.models) do
    if allowed(ask, model) then found = math.max(found, model.most_bytes or MOST_BYTES) end
  end
  state.largest[whose] = found > 0 and found or MOST_BYTES
  return state.largest[whose]
end

local function no_such_model(ask, name)
  local names = {}
  for _, model in ipairs(state.models) do
    if allowed(ask, model) then names[#names + 1] = "'" .. model.name .. "'" end
    if #names > 10 then break end
  end
  local serves = #names == 0 and "no model" or #names > 10 and "those of GET /v1/models" or table.concat(names, ", ")
  refuse(ask, 404, "model_not_found", format("model %s does not exist; this gateway serves %s", shown(name), serves),
    "model")
end

local function openai_card(model)
  local parent = model.parent and ',"parent":' .. quoted(model.parent) or ""
  return format('{"id":%s,"object":"model","created":%d,"owned_by":%s%s}', quoted(model.name), model.created,
    quoted(model.owner), parent)
end

local function moment(model) return os.date("!%Y-%m-%dT%H:%M:%SZ", model.created) end

local function anthropic_card(model)
  local name = quoted(model.name)
  return format('{"type":"model","id":%s,"display_name":%s,"created_at":"%s"}', name, name, moment(model))
end

local function ollama_card(model)
  local name = quoted(tagged(model.name))
  return format('{"name":%s,"model":%s,"modified_at":"%s","size":0,"digest":"%s","details":{"format":"","family":"",' ..
    '"families":null,"parameter_size":"","quantization_level":""},"expires_at":"2242-03-16T12:56:32Z","size_vram":0}',
    name, name, moment(model), string.rep(hash(model.name), 8))
end

local function listed(ask, card)
  local cards = {}
  for _, model in ipairs(state.models) do
    if allowed(ask, model) then cards[#cards + 1] = card(model) end
  end
  return table.concat(cards, ",")
end

local function list_models(ask)
  if not is_anthropic(ask) then return answer(ask, 200, format('{"object":"list","data":[%s]}', listed(ask, openai_card))) end
  local first, last
  for _, model in ipairs(state.models) do
    if allowed(ask, model) then first, last = first or model, model end
  end
  answer(ask, 200, format('{"data":[%s],"has_more":false,"first_id":%s,"last_id":%s}', listed(ask, anthropic_card),
    first and quoted(first.name) or "null", last and quoted(last.name) or "null"))
end

local function get(ask)
  local name = match(ask.path, "^/v1/models/(.+)$")
  if ask.path == "/v1/models" then
    list_models(ask)
  elseif name then
    name = gsub(name, "%%(%x%x)", function(digits) return char(tonumber(digits, 16)) end)
    local model = model_of(ask, name)
    if not model then return no_such_model(ask, name) end
    answer(ask, 200, is_anthropic(ask) and anthropic_card(model) or openai_card(model))
  elseif ask.path == "/api/tags" or ask.path == "/api/ps" then
    answer(ask, 200, format('{"models":[%s]}', listed(ask, ollama_card)))
  elseif ask.path == "/api/version" then
    answer(ask, 200, format('{"version":"%s"}', SETTINGS.ollama_version))
  else
    refuse(ask, 404, "not_found", "a gateway has no GET " .. shown(ask.path) .. ": ask the model's own Service")
  end
end

-- The tenant whose key the request has; nil: none.
local function tenant_of(headers)
  local bearer = match(headers:get("authorization") or "", "^[Bb][Ee][Aa][Rr][Ee][Rr] +(.-) *$")
  return state.keys[bearer or ""] or state.keys[headers:get("x-api-key") or ""] or state.keys[headers:get("api-key") or ""]
end

-- The member that names the model: {value, where it stands: from, to}; nil: there is none. Or why the body is refused: an
-- engine must find no other model in it than the gateway has looked at.
local function named_model(text, path)
  local start, found, count = find(text, "[^%s]"), {}, {model = 0, name = 0}
  if not start then return nil end
  if byte(text, start) ~= OBJECT then return nil, "the body must be a JSON object" end
  local after = members(text, start, function(member, from, to)
    if not count[member] then return end
    count[member] = count[member] + 1
    found[member] = {string_at(text, from, to), from, to}
  end)
  if not after or find(text, "[^%s]", after) then
    return nil, "the body could not be read to its end: send one JSON object, with less than a million quotes and brackets"
  end
  if count.model > 1 then return nil, "model is there " .. count.model .. " times: name one model" end
  local is_ollama = find(path, "/api/", 1, true) == 1  -- whose older clients call it name
  if is_ollama and count.name > 1 then return nil, "name is there " .. count.name .. " times: name one model" end
  local model, name = found.model, is_ollama and found.name or nil
  if name and not name[1] then name = nil end
  if not model or not model[1] then return name end
  if name and name[1] ~= model[1] then return nil, "model and name are not the same: send model alone" end
  return model
end

-- The body with another model.
local function renamed(text, member, name) return sub(text, 1, member[2] - 1) .. quoted(name) .. sub(text, member[3]) end

local function route(ask)
  local body = ask.handle:body()
  local text = body and body:length() > 0 and body:getBytes(0, body:length()) or ""
  local member, why = named_model(text, ask.path)
  if why then return refuse(ask, 400, "invalid_body", why, "model") end
  local name = member and member[1]
  if not name or name == "" then
    return refuse(ask, 400, "model_required", "model is required: name one that GET /v1/models lists", "model")
  end
  local model = model_of(ask, name)
  if not model then return no_such_model(ask, name) end
  if model.most_bytes and #text > model.most_bytes then
    return too_large(ask.handle, model.most_bytes, "model " .. shown(name))
  end
  local backend = model.backends and backend_of(ask.handle, model, text) or model
  if backend.served ~= model.name then
    local length = ask.handle:body():setBytes(renamed(text, member, backend.served))
    local headers = ask.handle:headers()
    if headers:get("content-length") then headers:replace("content-length", tostring(length)) end
  end
  ask.handle:headers():add(SETTINGS.pool_header, backend.pool)
  affinity(ask.handle)
end

local function asked(handle)
  local headers = handle:headers()
  local path, method = match(headers:get(":path"), "^[^?]*"), headers:get(":method")
  return {handle = handle, path = path, method = method, anthropic = headers:get("anthropic-version") ~= nil}
end

-- What the head of a request tells; nil: it has been answered. A body may still be on its way.
local function enter(handle)
  local headers, ask = handle:headers(), asked(handle)
  local path, method = ask.path, ask.method
  headers:remove(SETTINGS.pool_header)
  for _, name in ipairs({"x-octavo-tenant", "x-octavo-tenant-id", "x-octavo-cache-salt"}) do headers:remove(name) end
  if OPEN[path] and (method == "GET" or method == "HEAD") then
    return answer(ask, 200, "Octavo gateway\n", {["content-type"] = "text/plain"})
  end
  if #SETTINGS.tenants > 0 then
    ask.tenant = tenant_of(headers)
    if not ask.tenant then return refuse(ask, 401, "invalid_api_key", NO_KEY) end
    headers:add("x-octavo-tenant", ask.tenant.name)
    headers:add("x-octavo-tenant-id", ask.tenant.id)
    if ask.tenant.salt then headers:add("x-octavo-cache-salt", ask.tenant.salt) end
    for _, name in ipairs({"authorization", "x-api-key", "api-key"}) do headers:remove(name) end
  end
  if method == "GET" or method == "HEAD" then return get(ask) end
  if method ~= "POST" or not PASSED[path] then
    local what = shown(method .. " " .. path)
    return refuse(ask, 404, "not_found", format("a gateway has no %s: ask the model's own Service", what))
  end
  if is_short_enough(handle, largest(ask)) then return ask end
end

local function go_on(ask)
  if has_room(ask.handle, #SETTINGS.tenants > 1 and ask.tenant.name, MOST_BYTES) then route(ask) end
end

-- With tenants two filters run this, and what limits tenants stands between them, so that nobody waits for a body to be
-- refused: the first one (DOOR) reads the head. It tells the second one whose request it is where no client can.
function envoy_on_request(handle)
  look_again(handle)
  if #SETTINGS.tenants == 0 then
    local ask = enter(handle)
    if ask then go_on(ask) end
  elseif DOOR then
    local ask = enter(handle)
    if ask then handle:streamInfo():dynamicMetadata():set("octavo", "tenant", ask.tenant.name) end
  else
    local ask, told = asked(handle), handle:streamInfo():dynamicMetadata():get("octavo")
    for _, tenant in ipairs(SETTINGS.tenants) do
      if told and tenant.name == told.tenant then ask.tenant = tenant end
    end
    if not ask.tenant then return refuse(ask, 401, "invalid_api_key", NO_KEY) end
    go_on(ask)
  end
end
