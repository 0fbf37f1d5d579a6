-- Sliding window of two counters, as @upstash/ratelimit documents it: the client sends its time and
-- the names of the current and the previous window, whose count is weighted. Our own script.
-- KEYS: both counters. ARGV: limit, time and window in milliseconds. Returns the remaining, or -1.
local limit, now, window = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local current = tonumber(redis.call('GET', KEYS[1]) or 0)
local previous = tonumber(redis.call('GET', KEYS[2]) or 0)
local weighted = math.floor(previous * (1 - (now % window) / window))
if current + weighted >= limit then
  return -1
end
local count = redis.call('INCR', KEYS[1])
if count == 1 then
  redis.call('PEXPIRE', KEYS[1], 2 * window + 1000)
end
return limit - count - weighted
