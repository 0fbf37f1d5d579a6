-- Says that an instance is alive, and tells which are.
--
-- KEYS   1  the sorted set of instances: score = when it last said so, in the server's microseconds
-- ARGV   1  the instance
--        2  after how many microseconds of silence an instance counts as gone
--        3  the most instances that are told
-- reply  the instances that are alive, in the order of their names; this one is always among them

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local silence, most = tonumber(ARGV[2]), tonumber(ARGV[3])
-- Those of a time yet to come were said before the clock was set back: they are renewed soon, or gone.
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - silence)
redis.call('ZREMRANGEBYSCORE', KEYS[1], now + silence, '+inf')
redis.call('ZADD', KEYS[1], now, ARGV[1])
redis.call('PEXPIREAT', KEYS[1], math.ceil((now + silence) / 1000) + 1)
local alive = redis.call('ZRANGE', KEYS[1], 0, most - 2)
local listed = false
for i = 1, #alive do listed = listed or alive[i] == ARGV[1] end
if not listed then alive[#alive + 1] = ARGV[1] end
table.sort(alive)
return alive
