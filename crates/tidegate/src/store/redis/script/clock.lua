-- Reads the clock of the server. decide.lua includes it, or clock.estimated.lua.
-- outputs: clock, server_time, now, expiry_shift
-- luacheck: no unused

local clock = redis.call('TIME')
local server_time = clock[1] * 1000000 + clock[2]
local now, expiry_shift = server_time, 0
