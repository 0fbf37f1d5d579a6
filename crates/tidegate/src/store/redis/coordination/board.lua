-- Publishes what the instances of a fleet show each other, and reads it: a text of each instance,
-- texts that several instances share, and lists of events.
--
-- KEYS   publish: 1  text of the instance
--                 2  shared text
--        read:    all texts to read
--        append, list: 1  list of events, sorted: score = time in microseconds of the server's
--           clock
-- ARGV   1  publish | read | append | list
--        publish: 2  text of the instance, 3  its TTL in milliseconds
--                 4  TTL of the shared text, 5  the shared text; empty: the one that is there
--        append:  2  maximum number of events in the list, 3  its TTL in milliseconds
--                 4  number of new events; then the age in microseconds and the text of each
--        list:    2  and 3  ranks of the first and the last event to read
-- reply  publish: 1, or 0 if the instance had no text before; 1, or 0 if there is no shared text to
--           keep
--        read:    the texts, in the order of their keys
--        append:  the number of events in the list
--        list:    text and score of each event, the oldest first

local operation = ARGV[1]

if operation == 'read' then
  local texts = {}
  for i, key in ipairs(KEYS) do texts[i] = redis.call('GET', key) end
  return texts
end

if operation == 'list' then
  return redis.call('ZRANGE', KEYS[1], ARGV[2], ARGV[3], 'WITHSCORES')
end

local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]

if operation == 'publish' then
  local was_there = redis.call('PEXPIREAT', KEYS[1], math.ceil(now / 1000) + ARGV[3])
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
  if ARGV[5] ~= '' then
    redis.call('SET', KEYS[2], ARGV[5], 'PX', ARGV[4])
    return {was_there, 1}
  end
  return {was_there, redis.call('PEXPIREAT', KEYS[2], math.ceil(now / 1000) + ARGV[4])}
end

for i = 5, 3 + 2 * ARGV[4], 2 do
  redis.call('ZADD', KEYS[1], string.format('%.0f', now - ARGV[i]), ARGV[i + 1])
end
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - ARGV[2])
redis.call('PEXPIREAT', KEYS[1], math.ceil(now / 1000) + ARGV[3])
return redis.call('ZCARD', KEYS[1])
