-- Leaky bucket: a hash with the level and the time of the last request.
-- KEYS: the hash. ARGV: limit, window in microseconds. Returns whether allowed, and the remaining.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local limit, window = tonumber(ARGV[1]), tonumber(ARGV[2])
local fields = redis.call('HMGET', KEYS[1], 'level', 'time')
local level, last = tonumber(fields[1]) or 0, tonumber(fields[2]) or now
level = math.max(0, level - (now - last) * limit / window)
if level + 1 > limit then
  return {0, 0}
end
level = level + 1
redis.call('HSET', KEYS[1], 'level', string.format('%.6f', level), 'time',
  string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], math.ceil(window / 1000))
return {1, math.floor(limit - level)}
