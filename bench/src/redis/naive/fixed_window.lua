-- Fixed window: a count that expires.
-- KEYS: the count. ARGV: limit, window in microseconds. Returns whether allowed, and the remaining.
local count = redis.call('INCR', KEYS[1])
if count == 1 then
  redis.call('PEXPIRE', KEYS[1], math.ceil(ARGV[2] / 1000))
end
local limit = tonumber(ARGV[1])
if count > limit then
  return {0, 0}
end
return {1, limit - count}
