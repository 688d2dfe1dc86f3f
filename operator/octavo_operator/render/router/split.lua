-- A model name that several pools share. Stands behind key.lua and SETTINGS, before gateway.lua.
-- The key of a conversation chooses, not a die: its turns find the prefix of the ones before, and the same model. Every
-- pool draws a number for the key, and the least one divided by the pool's weight wins (weighted rendezvous hashing), so
-- another weight moves conversations from or to that pool alone. Pools without a healthy replica are left out; when
-- there is none with one, all take part, so that the chosen one's error, or its picker, answers.
local log = math.log
local alive = {checked = 0, pools = {}}

-- Envoy's own counts of healthy replicas, asked at most once a second; while they cannot be read, the last ones hold.
local function look_at_health(handle)
  local now = os.time()
  if now == alive.checked then return end
  alive.checked = now
  local headers, body = handle:httpCall(SETTINGS.admin, {
    [":method"] = "GET", [":authority"] = SETTINGS.admin,
    [":path"] = "/stats?type=Gauges&filter=membership_healthy%24",
  }, "", 500)
  if not headers or headers[":status"] ~= "200" or not body then return end
  local pools = {}
  for name, healthy in string.gmatch(body, "cluster%.([^\n]-)%.membership_healthy: (%d+)") do
    pools[name] = tonumber(healthy) > 0
  end
  alive.pools = pools
end

local function drawn(key, backend)
  local number = tonumber(hash(hash(backend.pool .. key)), 16)  -- twice: draws of two pools must not be alike
  return -log((number + 0.5) / 4294967296) / backend.weight
end

local function choose(backends, key, is_alive)
  local best, least
  for _, backend in ipairs(backends) do
    if backend.weight > 0 and is_alive(backend.pool) then
      local number = drawn(key, backend)
      if not least or number < least then best, least = backend, number end
    end
  end
  return best
end

-- The backend of a shared model that answers a request. Asks Envoy: headers and bodies are to be asked for anew.
local function backend_of(handle, model, text)
  local headers = handle:headers()
  local key = hash(session_of(headers, SESSION_HEADERS) or key_text(text, nil, session_of(headers, AGENTS)) or text)
  look_at_health(handle)
  return choose(model.backends, key, function(pool) return alive.pools[pool] ~= false end)
    or choose(model.backends, key, function() return true end)
end
