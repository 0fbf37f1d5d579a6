-- Sliding window as applications write it: a sorted set with one member per request.
-- KEYS: the set. ARGV: time of the client in seconds, window in seconds, limit, unique member.
-- Returns whether the request is allowed.
local now, window, limit = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now - window)
if redis.call('ZCARD', KEYS[1]) >= limit then
  return 0
end
redis.call('ZADD', KEYS[1], now, ARGV[4])
redis.call('EXPIRE', KEYS[1], window)
return 1
