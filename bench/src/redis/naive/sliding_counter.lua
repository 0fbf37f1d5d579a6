-- Sliding counter: a hash with the window's number, its count and the count of the one before.
-- KEYS: the hash. ARGV: limit, window in microseconds. Returns whether allowed, and the remaining.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local limit, window = tonumber(ARGV[1]), tonumber(ARGV[2])
local current = math.floor(now / window)
local fields = redis.call('HMGET', KEYS[1], 'window', 'count', 'previous')
local stored = tonumber(fields[1])
local count, previous = tonumber(fields[2]) or 0, tonumber(fields[3]) or 0
if stored ~= current then
  previous = stored == current - 1 and count or 0
  count = 0
end
local used = previous * (1 - (now - current * window) / window) + count
if used + 1 > limit then
  return {0, 0}
end
redis.call('HSET', KEYS[1], 'window', string.format('%.0f', current), 'count', count + 1,
  'previous', previous)
redis.call('PEXPIRE', KEYS[1], math.ceil(window / 500))
return {1, math.floor(limit - used - 1)}
