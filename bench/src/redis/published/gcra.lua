-- GCRA, as go-redis/redis_rate documents it: one number, the time at which the bucket would be
-- empty, by the time of the server. Our own script.
-- KEYS: the number. ARGV: burst, limit, window in seconds. Returns allowed, remaining, and the
-- waits for the next request and for all of them, as texts.
local burst, interval = tonumber(ARGV[1]), tonumber(ARGV[3]) / tonumber(ARGV[2])
local time = redis.call('TIME')
-- Seconds since 2017, so that a double has the microseconds.
local now = time[1] - 1483228800 + time[2] / 1000000
local empty_at = math.max(tonumber(redis.call('GET', KEYS[1]) or now), now) + interval
local room = now - (empty_at - burst * interval)
if room < 0 then
  return {0, 0, tostring(-room), tostring(empty_at - interval - now)}
end
redis.call('SET', KEYS[1], empty_at, 'EX', math.ceil(empty_at - now))
return {1, math.floor(room / interval + 0.5), '-1', tostring(empty_at - now)}
