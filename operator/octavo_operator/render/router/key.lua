-- The affinity key of a request, for the ring hash: requests of one conversation get the same key in every turn.
-- The first that exists: a session header; prompt_cache_key; the session of a coding agent; of a chat its messages
-- through the first one of the user; of another request the beginning of its prompt or input. A wrong key costs a
-- prefix hit, never an answer, so the body is scanned, not checked. SESSION_HEADERS and other constants stand above: the
-- operator puts them there.
local SMALL_BYTES, CHAT_BYTES, MOST_PARTS, IMAGE_BYTES, LARGE_BYTES = 65536, 16384, 1000000, 4096, 1048576
local band, bxor, lshift, rol, rshift = bit.band, bit.bxor, bit.lshift, bit.rol, bit.rshift
local byte, char, find, sub = string.byte, string.char, string.find, string.sub
local QUOTE, COMMA, COLON, OBJECT, ARRAY, BACKSLASH = 34, 44, 58, 123, 91, 92
local TEXT = {text = true, url = true, data = true, image_url = true, source = true, content = true}
local IMAGE = {url = true, data = true, image_url = true, source = true, images = true}
local AGENTS = {"x-claude-code-session-id", "session-id", "thread-id"}
local ESCAPES = {b = "\b", f = "\f", n = "\n", r = "\r", t = "\t"}

local function utf8(code)
  if code < 0x80 then return char(code) end
  if code < 0x800 then return char(0xC0 + rshift(code, 6), 0x80 + band(code, 63)) end
  if code < 0x10000 then
    return char(0xE0 + rshift(code, 12), 0x80 + band(rshift(code, 6), 63), 0x80 + band(code, 63))
  end
  return char(0xF0 + rshift(code, 18), 0x80 + band(rshift(code, 12), 63), 0x80 + band(rshift(code, 6), 63),
    0x80 + band(code, 63))
end

local function unescaped(text)
  if not find(text, "\\", 1, true) then return text end
  text = text:gsub("\\(.)(%x?%x?%x?%x?)", function(letter, digits)
    if letter == "u" and #digits == 4 then return utf8(tonumber(digits, 16)) end
    return (ESCAPES[letter] or letter) .. digits
  end)
  -- Two halves of a character beyond U+FFFF are one character, as without escapes.
  return (text:gsub("\237([\160-\175])([\128-\191])\237([\176-\191])([\128-\191])", function(a, b, c, d)
    local high = lshift(band(byte(a), 15), 6) + band(byte(b), 63)
    return utf8(0x10000 + lshift(high, 10) + lshift(band(byte(c), 15), 6) + band(byte(d), 63))
  end))
end

-- The position after the string that begins at `i`; nil: the body ends before. Quotes alone are looked for, so that the
-- megabytes of an image cost next to nothing.
local function after_string(body, i)
  local from = i + 1
  for _ = 1, MOST_PARTS do
    local at = find(body, '"', from, true)
    if not at then return nil end
    local before = at - 1
    while byte(body, before) == BACKSLASH do before = before - 1 end
    if (at - before) % 2 == 1 then return at + 1 end
    from = at + 1
  end
end

local function after_value(body, i)
  local first = byte(body, i)
  if first == QUOTE then return after_string(body, i) end
  if first ~= OBJECT and first ~= ARRAY then return find(body, "[%s,%]}]", i) end
  local depth = 0
  for _ = 1, MOST_PARTS do  -- a body of nothing but brackets must not hold up a thread of Envoy's
    local at = find(body, '["%[%]{}]', i)
    if not at then return nil end
    local c = byte(body, at)
    if c == QUOTE then
      i = after_string(body, at)
      if not i then return nil end
    else
      depth = depth + ((c == OBJECT or c == ARRAY) and 1 or -1)
      if depth == 0 then return at + 1 end
      i = at + 1
    end
  end
end

-- visit(name, from, to) for each member of the object or array at `i` (an array's have no name), until it returns true.
-- Returns the position after the object or array; nil: it was not read to its end.
local function members(body, i, visit)
  local named = byte(body, i) == OBJECT
  local closing = named and 125 or 93
  i = find(body, "[^%s]", i + 1)
  if i and byte(body, i) == closing then return i + 1 end
  while i do
    local name
    if named then
      local to = byte(body, i) == QUOTE and after_string(body, i)
      if not to then return end
      name = unescaped(sub(body, i + 1, to - 2))
      i = find(body, "[^%s]", to)
      if not i or byte(body, i) ~= COLON then return end
      i = find(body, "[^%s]", i + 1)
    end
    if not i then return end
    local to = after_value(body, i)
    if visit(name, i, to or #body + 1) or not to then return end
    i = find(body, "[^%s]", to)
    if i and byte(body, i) == closing then return i + 1 end
    if not i or byte(body, i) ~= COMMA then return end
    i = find(body, "[^%s]", i + 1)
  end
end

local function string_at(body, from, to)
  if byte(body, from) == QUOTE then return unescaped(sub(body, from + 1, to - 2)) end
end

-- Appends the texts of a value (a string, parts, token ids) to `out`, about `limit` bytes of them. Of an image that is
-- long its length, beginning and end: images of one camera begin alike, and the text beside them counts.
local function append_texts(body, from, to, out, limit, image)
  local first = byte(body, from)
  if first == QUOTE and image and to - from > IMAGE_BYTES then
    local half = IMAGE_BYTES / 2
    out[#out + 1] = sub(body, from + 1, from + half) .. (to - from) .. sub(body, to - 1 - half, to - 2)
    out.size = out.size + IMAGE_BYTES
  elseif first == QUOTE then
    local text = unescaped(sub(body, from + 1, math.min(to - 2, from + 6 * limit)))
    out[#out + 1], out.size = sub(text, 1, limit), out.size + #text
  elseif first == OBJECT or first == ARRAY then
    members(body, from, function(name, i, after)
      if not name or TEXT[name] then append_texts(body, i, after, out, limit, IMAGE[name] or (not name and image)) end
      return out.size >= limit
    end)
  else
    out[#out + 1], out.size = sub(body, from, to - 1), out.size + to - from
  end
end

-- Of a list of messages: roles and texts through the first message of the user; false: it is no list of messages.
local function append_messages(body, from, out)
  local found = false
  if byte(body, from) ~= ARRAY then return false end
  members(body, from, function(_, i)
    if byte(body, i) ~= OBJECT then return true end
    local role, at = nil, {}
    members(body, i, function(name, from, to)
      if name == "role" then role = string_at(body, from, to) end
      if name == "content" or name == "images" then at[name] = {from, to} end
    end)
    found = found or role ~= nil
    out[#out + 1] = role or ""
    if at.images then append_texts(body, at.images[1], at.images[2], out, CHAT_BYTES, true) end  -- Ollama's
    if at.content then append_texts(body, at.content[1], at.content[2], out, CHAT_BYTES) end
    return role == "user" or out.size >= CHAT_BYTES
  end)
  return found
end

-- The session that Claude Code names in its user's id: a JSON text, or one that ends with it.
local function session_of_user(id)
  return id:match('"session_id"%s*:%s*"([^"]+)"') or id:match("_session_([%w-]+)$")
end

-- `agent`: the session of a coding agent, by its header. Its subagents have it, too, so it is a hint like the others, by
-- which a replica with too much load is left.
local function key_text(body, salt, agent)
  local start = find(body, "[^%s]")
  if not start or byte(body, start) ~= OBJECT then return nil end
  local at = {}
  members(body, start, function(name, from, to) at[name] = {from, to} end)
  local function string_of(name) return at[name] and string_at(body, at[name][1], at[name][2]) or "" end
  local out = {size = 0, string_of("model"), string_of("cache_salt"), salt}
  local key = string_of("prompt_cache_key")
  if key == "" then key = agent end
  if not key and at.metadata and byte(body, at.metadata[1]) == OBJECT then
    members(body, at.metadata[1], function(name, from, to)
      if name == "user_id" then key = session_of_user(string_at(body, from, to) or "") end
    end)
  end
  if key then
    out[#out + 1] = key
  elseif not (at.messages and append_messages(body, at.messages[1], out)) then
    local text = at.prompt or at.input
    if not text then return nil end
    if at.images then append_texts(body, at.images[1], at.images[2], out, CHAT_BYTES, true) end
    if not append_messages(body, text[1], out) then append_texts(body, text[1], text[2], out, KEY_BYTES) end
  end
  return table.concat(out, "\0")
end

-- Bob Jenkins' one-at-a-time hash over words of 4 bytes.
local function hash(text)
  local h = #text
  for i = 1, #text, 4 do
    local a, b, c, d = byte(text, i, i + 3)
    h = bit.tobit(h + bxor(a, lshift(b or 0, 8), lshift(c or 0, 16), lshift(d or 0, 24)))
    h = bit.tobit(h + lshift(h, 10))
    h = bxor(h, rshift(h, 6), rol(h, 17))
  end
  h = bit.tobit(h + lshift(h, 3))
  h = bxor(h, rshift(h, 11))
  return bit.tohex(bit.tobit(h + lshift(h, 15)))
end

local function session_of(headers, names)
  for _, name in ipairs(names) do
    local session = headers:get(name)
    if session and session ~= "" then return session end
  end
end

local function affinity(handle)
  local headers = handle:headers()
  headers:remove("x-octavo-key")
  headers:remove("x-gateway-destination-endpoint")
  local salt = headers:get("x-octavo-cache-salt") or ""
  local session = session_of(headers, SESSION_HEADERS)
  if session then
    headers:add("x-octavo-key", "=" .. hash(session .. salt))  -- nobody else's: the picker keeps it at one replica
    return
  end
  local agent = session_of(headers, AGENTS)
  local body = handle:body()
  if not body or body:length() == 0 then return end
  local text = key_text(body:getBytes(0, body:length()), salt, agent)
  if body:length() > LARGE_BYTES then collectgarbage() end  -- or copies of many megabytes lie about until much later
  -- Headers are to be asked for anew once the body has arrived: the old object is out of scope then.
  if text then handle:headers():add("x-octavo-key", hash(text)) end
end

-- The bytes of the bodies of this thread's requests in progress, complete or not. Envoy buffers them: if they exceed its
-- memory, all streams end. A handle lives as long as its stream, and the garbage collector drops it from this weak table.
local claims, claimed, swept, grown = setmetatable({}, {__mode = "k"}), 0, 0, 0
local shares = {}  -- bytes by tenant, where there are several

local function claim(handle, tenant, bytes)
  claims[handle], claimed, grown = {bytes, tenant}, claimed + bytes, grown + bytes
  if tenant then shares[tenant] = (shares[tenant] or 0) + bytes end
end

-- Collect the handles of streams that have ended: once a second, and after every eighth of ALL_BYTES that was claimed.
local function sweep()
  if os.time() == swept and grown < ALL_BYTES / 8 then return end
  swept = os.time()
  collectgarbage()
  collectgarbage()  -- objects with a finalizer leave a weak table in the second cycle
  local left = claims
  claims, claimed, shares = setmetatable({}, {__mode = "k"}), 0, {}
  for handle, one in pairs(left) do claim(handle, one[2], one[1]) end
  grown = 0
end

-- Return whose requests leave no room for so many more bytes; nil if there is room. A tenant never takes more than it
-- leaves free: one alone takes up to half, two up to a third each. So a new tenant finds room, whatever the others send.
local function without_room(bytes, tenant)
  local free, share = ALL_BYTES - claimed, tenant and shares[tenant] or 0
  if share > 0 and share + bytes > free then return "of this API key's requests" end
  if claimed > 0 and bytes > free then return "of requests" end
end

-- `most`: bytes that `who` takes.
local function too_large(handle, most, who)
  handle:respond({[":status"] = "416"}, "the request is larger than " .. most .. " bytes, the most that " .. who ..
    " takes (--max-request-bytes): send less")
end

-- Return true if the announced length of a request's body is allowed; otherwise refuse the request. `most`: the largest
-- number of bytes that any model which the request may name accepts.
local function is_short_enough(handle, most)
  local length = tonumber(handle:headers():get("content-length") or "")
  if not length or length <= math.min(most, MOST_BYTES) then return true end
  if length > MOST_BYTES then handle:respond({[":status"] = "413"}, "") else too_large(handle, most, "a model here") end
  return false
end

-- Return true and claim the bytes if there is room for a request's body; otherwise refuse the request. `tenant`: the one
-- that sends it, where there are several.
local function has_room(handle, tenant, most)
  local headers = handle:headers()
  local length = tonumber(headers:get("content-length") or "")
  if not length and headers:get(":method") == "GET" then return true end
  if not is_short_enough(handle, most) then return false end
  local bytes = length or MOST_BYTES
  if bytes <= SMALL_BYTES then return true end
  if without_room(bytes, tenant) then sweep() end
  local whose = without_room(bytes, tenant)
  if whose then
    handle:respond({[":status"] = "423", ["retry-after"] = "1"}, "too many bytes " .. whose .. " are under way here: " ..
      "try again after the seconds of Retry-After, or send a smaller request")
    return false
  end
  claim(handle, tenant, bytes)
  if length then return true end
  local body = handle:body()  -- a body without a Content-Length counts as MOST_BYTES until it has arrived
  claim(handle, tenant, -bytes)
  claim(handle, tenant, body and body:length() or 0)
  return true
end

function envoy_on_request(handle)
  local headers = handle:headers()
  -- A gateway's alone, which has another function of this name: whoever asks a router may claim to be any tenant.
  headers:remove("x-octavo-tenant")
  headers:remove("x-octavo-tenant-id")
  headers:remove("x-octavo-cache-salt")
  local is_file = find(headers:get(":path"), "^/v1/files")  -- which engines limit otherwise
  if has_room(handle, nil, is_file and MOST_BYTES or MODEL_BYTES) then affinity(handle) end
end
