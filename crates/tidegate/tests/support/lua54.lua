-- Runs scripts by Lua 5.4, as Dragonfly does; Redis and Valkey have Lua 5.1. strict.rs sends a
-- script with its number of keys, keys and arguments, answers each command that the script calls,
-- and gets the line `return` with the reply. Values have the form of the Redis protocol.
-- luacheck: globals KEYS ARGV redis struct unpack
-- luacheck: read globals io os table math string load

local function read()
  local line = io.read('L')
  if not line then os.exit(0) end
  local kind, rest = line:sub(1, 1), line:sub(2, -3)
  if kind == '+' then return {ok = rest} end
  if kind == '-' then return {err = rest} end
  local number = math.tointeger(rest)
  if kind == ':' then return number end
  if number < 0 then return false end
  if kind == '$' then return io.read(number + 2):sub(1, -3) end
  local values = {}
  for i = 1, number do values[i] = read() end
  return values
end

local function bulk(text) return '$' .. #text .. '\r\n' .. text .. '\r\n' end

local function as_text(value)
  if type(value) == 'string' then return value end
  return string.format(math.type(value) == 'integer' and '%d' or '%.17g', value)
end

local function reply(value)
  if not value then return '$-1\r\n' end
  if math.type(value) == 'integer' then return ':' .. value .. '\r\n' end
  if type(value) ~= 'table' then return bulk(as_text(value)) end
  if value.err then return '-' .. value.err .. '\r\n' end
  if value.ok then return '+' .. value.ok .. '\r\n' end
  local values = {}
  for i, item in ipairs(value) do values[i] = reply(item) end
  return '*' .. #values .. '\r\n' .. table.concat(values)
end

local function call(...)
  local words = {...}
  for i, word in ipairs(words) do words[i] = bulk(as_text(word)) end
  io.write('*', #words, '\r\n', table.concat(words))
  io.flush()
  return read()
end

unpack = table.unpack
-- The numbers of the library `struct` are floats.
struct = {pack = string.pack, unpack = function(...)
  local values = table.pack(string.unpack(...))
  for i = 1, values.n - 1 do values[i] = values[i] + 0.0 end
  return table.unpack(values, 1, values.n)
end}
redis = {pcall = call, call = function(...)
  local value = call(...)
  if type(value) == 'table' and value.err then error('@user_script: 1: ' .. value.err, 0) end
  return value
end}

while true do
  local request = read()
  local keys = 2 + request[2]
  KEYS, ARGV = table.move(request, 3, keys, 1, {}), table.move(request, keys + 1, #request, 1, {})
  local script, message = load(request[1], '@user_script')
  local done, value = false, message
  if script then done, value = pcall(script) end
  if not done and type(value) == 'string' then
    value = {err = 'ERR Error running script: ' .. value:gsub('[\r\n]', ' ')}
  end
  io.write('return\r\n', reply(value))
  io.flush()
end
