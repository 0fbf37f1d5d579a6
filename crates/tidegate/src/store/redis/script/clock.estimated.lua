-- Takes the time from the header, for servers that refuse TIME in scripts. decide.lua includes it,
-- or clock.lua.
-- inputs
-- luacheck: read globals deadline
-- outputs: clock, server_time, now, expiry_shift
-- luacheck: no unused

-- Estimates of two instances differ, and a call may run late. A count that is ahead by up to
-- `max_skew` has the time, so that no count goes back: see general.lua. Its key must not expire
-- before that by the server's clock, either.
local micros = deadline % 1000000
local clock = {
  string.format('%.0f', (deadline - micros) / 1000000), string.format('%.0f', micros),
  max_skew = 10000000,
}
local server_time = deadline
local now, expiry_shift = server_time, clock.max_skew
