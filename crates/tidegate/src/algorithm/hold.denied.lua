-- Leaves a denial to hold.lua if the id has a record, whose answer is repeated then. A fast path
-- includes this file.
-- inputs
-- luacheck: read globals i keys mode try
-- outputs
-- luacheck: globals slow
-- luacheck: no unused

if mode and try('GET', keys[i + 1]) then slow = i end
