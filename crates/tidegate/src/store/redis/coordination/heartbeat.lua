-- Refreshes an instance in the set of live instances, and returns the set if it has changed.
--
-- KEYS   1  sorted set of instances: score = time of the heartbeat in microseconds of the server's
--           clock, plus the part of the instance's silence timeout that is beyond the shortest
--        2  version of the set: a random token, replaced whenever an instance joins or expires
--        3  version of the overrides, if the caller wants it
-- ARGV   1  the instance
--        2  shortest silence timeout, after which an instance is removed, in microseconds
--        3  silence timeout per instance of the fleet: a larger fleet sends heartbeats less often
--        4  longest silence timeout
--        5  number of instances that the caller knows
--        6  version that the caller knows; empty for none
--        7  a random token, for a new version
--        8  maximum number of instances to return; 0 for none
-- reply  the version; if it is not the caller's, the instances in no particular order, or else nil;
--        the version of the overrides, '' without any, or nil. The list may omit the caller if
--        there are more than the maximum

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local shortest, longest = tonumber(ARGV[2]), tonumber(ARGV[4])
local members, expired = redis.call('ZCARD', KEYS[1]), 0
-- In a large fleet one heartbeat in eight removes expired instances and extends the keys' expiry,
-- which is minutes away.
local thorough = members <= 100 or clock[2] % 8 == 0
if thorough then
  expired = redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - shortest)
  -- Scores beyond the longest timeout are from before the clock stepped back. A live instance
  -- returns with its next heartbeat.
  expired = expired + redis.call('ZREMRANGEBYSCORE', KEYS[1], now + longest, '+inf')
  members = members - expired
end
-- The caller chooses its next interval by the size that it knows, or by the one that it learns from
-- this reply.
local size = math.max(tonumber(ARGV[5]), members + 1)
local silence = math.min(math.max(shortest, size * tonumber(ARGV[3])), longest)
local joined = redis.call('ZADD', KEYS[1], now + silence - shortest, ARGV[1])
local expires_at = math.ceil((now + longest) / 1000)
local token = redis.call('GET', KEYS[2])
if not token or expired + joined > 0 then
  token = ARGV[7]
  redis.call('SET', KEYS[2], token, 'PXAT', expires_at)
elseif thorough then
  redis.call('PEXPIREAT', KEYS[2], expires_at)
end
if thorough or joined > 0 then redis.call('PEXPIREAT', KEYS[1], expires_at) end
-- Instances of an earlier version do not replace the token, so the version includes the size.
local version = token .. ':' .. (members + joined)
local max_listed = tonumber(ARGV[8])
local list = false
if version ~= ARGV[6] and max_listed > 0 then
  list = redis.call('ZRANGE', KEYS[1], 0, max_listed - 1)
end
return {version, list, KEYS[3] and (redis.call('GET', KEYS[3]) or '')}
