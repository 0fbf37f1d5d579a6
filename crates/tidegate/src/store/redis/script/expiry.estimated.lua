-- Sets expiries relative to the server's clock, because an estimated time may be long ago for the
-- server, which would delete the count at once. Precedes each script whose clock is estimated, and
-- stands for `redis` there.
-- luacheck: no unused

-- Milliseconds of the estimated time: of decide.lua in its header, of others in the last argument.
local seconds, micros = string.match(ARGV[#ARGV], '^(%d+) (%d+)$')
local given = seconds and seconds * 1000 + math.floor(micros / 1000)
  or math.floor(struct.unpack('<d', ARGV[1]) / 1000)
local server = redis
local function relative(command, key, ...)
  if command == 'PEXPIREAT' then
    local at = ...
    return 'PEXPIRE', key, at - given
  end
  local value, option, at = ...
  if command == 'SET' and option == 'PXAT' then
    return command, key, value, 'PX', at - given
  end
  return command, key, ...
end
-- luacheck: push ignore 431
local redis = {
  call = function(...) return server.call(relative(...)) end,
  pcall = function(...) return server.pcall(relative(...)) end,
}
-- luacheck: pop
