-- Token bucket: a hash with the tokens and the time of the last request.
-- KEYS: the hash. ARGV: limit, window in microseconds. Returns whether allowed, and the remaining.
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local limit, window = tonumber(ARGV[1]), tonumber(ARGV[2])
local fields = redis.call('HMGET', KEYS[1], 'tokens', 'time')
local tokens, last = tonumber(fields[1]) or limit, tonumber(fields[2]) or now
tokens = math.min(limit, tokens + (now - last) * limit / window)
if tokens < 1 then
  return {0, 0}
end
tokens = tokens - 1
redis.call('HSET', KEYS[1], 'tokens', string.format('%.6f', tokens), 'time',
  string.format('%.0f', now))
redis.call('PEXPIRE', KEYS[1], math.ceil(window / 1000))
return {1, math.floor(tokens)}
