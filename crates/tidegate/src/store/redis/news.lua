-- News of counts that have room again, because units were given back or the count was forgotten: tells them, or tells what
-- is new.
--
-- KEYS   1  the sorted set of news: score = its number, member = <number>:<word of its teller>:<count>
--           The first one has the number 0 and no count: a reader has begun the set, and with it the numbers.
-- ARGV   1  tell | read
--        2  a word that no other call has
--        tell:  3  the most news that are kept; then the counts
--        read:  3  how many milliseconds after the last reader the set is forgotten
--               4  the mark: the member that was read last, '' for none
-- reply  tell:  how many were told: none if nobody reads
--        read:  the server's time in microseconds; 1, or 0 if the mark is not there any more, so that anything may have been
--               missed; the new mark; then, if the mark was there, the members since
--
-- A mark that is not there: too many news have come, or the server lost them, and with them perhaps counts.

local news, word = KEYS[1], ARGV[2]

if ARGV[1] == 'tell' then
  local last = redis.call('ZRANGE', news, -1, -1)[1]
  if not last then return 0 end
  local number = tonumber(last:match('^%d+'))
  for i = 4, #ARGV do
    number = number + 1
    redis.call('ZADD', news, number, string.format('%.0f:%s:%s', number, word, ARGV[i]))
  end
  redis.call('ZREMRANGEBYRANK', news, 0, -1 - tonumber(ARGV[3]))
  return #ARGV - 3
end

local lifetime, mark = tonumber(ARGV[3]), ARGV[4]
local clock = redis.call('TIME')
local reply = {clock[1] * 1000000 + clock[2], 1}
local since = mark ~= '' and redis.call('ZRANGEBYSCORE', news, mark:match('^%d+'), '+inf') or {}
if since[1] == mark then
  reply[3] = since[#since]
  for i = 2, #since do reply[i + 2] = since[i] end
else
  local last = redis.call('ZRANGE', news, -1, -1)[1]
  if not last then
    last = '0:' .. word .. ':'
    redis.call('ZADD', news, 0, last)
  end
  reply[2], reply[3] = 0, last
end
redis.call('PEXPIREAT', news, clock[1] * 1000 + math.floor(clock[2] / 1000) + lifetime)
return reply
