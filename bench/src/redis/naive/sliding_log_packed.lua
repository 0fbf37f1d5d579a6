-- Sliding log: a string with four bytes per request, its time in milliseconds modulo 2^32.
-- KEYS: the log. ARGV: limit, window in microseconds. Returns whether allowed, and the remaining.
local time = redis.call('TIME')
local now = (time[1] * 1000 + math.floor(time[2] / 1000)) % 4294967296
local limit, window = tonumber(ARGV[1]), ARGV[2] / 1000
local log = redis.call('GET', KEYS[1]) or ''
local count = #log / 4
if count >= limit then
  if (now - struct.unpack('<I4', log)) % 4294967296 < window then
    return {0, 0}
  end
  log = string.sub(log, 5)
  count = count - 1
end
redis.call('SET', KEYS[1], log .. struct.pack('<I4', now), 'PX', math.ceil(window))
return {1, limit - count - 1}
