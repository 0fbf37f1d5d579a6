-- Publishes invalidations (counts that have units again after a refund or a reset), or polls those
-- since a cursor.
--
-- KEYS   1  invalidation set, sorted: score = number, member = <number>:<nonce of the call>:<count>
--           The first reader creates the set with a member that has the number 0 and no count.
-- ARGV   1  publish | publish-all | poll
--        2  nonce: differs in every call
--        publish:  3  maximum number of members to keep; then the counts
--        poll:     3  TTL of the set in milliseconds, from the last poll on
--                  4  cursor: the last member that was read, '' for none
-- reply  publish, publish-all:  number of counts that were published; 0 if there is no reader, or
--               if the set was deleted
--        poll:  the server's time in microseconds; 1, or 0 if the cursor was not found, so that
--               invalidations may have been missed; the new cursor; then, if the cursor was found,
--               the members after it
--
-- A reader whose cursor is not found drops its whole cache. That happens after too many
-- invalidations, after a loss of data (which may include counts), and after publish-all, which
-- deletes the set. A publish that a full server rejects also deletes the set, because UNLINK is
-- always accepted; polls then fail until there is memory for a new set.

local set, nonce = KEYS[1], ARGV[2]

if ARGV[1] == 'publish-all' then
  redis.call('UNLINK', set)
  return 0
end

if ARGV[1] == 'publish' then
  local last = redis.call('ZRANGE', set, -1, -1)[1]
  if not last then return 0 end
  local number, members = tonumber(last:match('^%d+')), {}
  for i = 4, #ARGV do
    number = number + 1
    members[#members + 1] = number
    members[#members + 1] = string.format('%.0f:%s:%s', number, nonce, ARGV[i])
  end
  local added = redis.pcall('ZADD', set, unpack(members))
  if type(added) == 'table' and added.err then
    redis.call('UNLINK', set)
    return 0
  end
  redis.call('ZREMRANGEBYRANK', set, 0, -1 - tonumber(ARGV[3]))
  return #ARGV - 3
end

local ttl, cursor = tonumber(ARGV[3]), ARGV[4]
local clock = redis.call('TIME')
local reply = {clock[1] * 1000000 + clock[2], 1}
local since = cursor ~= '' and redis.call('ZRANGEBYSCORE', set, cursor:match('^%d+'), '+inf') or {}
if since[1] == cursor then
  reply[3] = since[#since]
  for i = 2, #since do reply[i + 2] = since[i] end
else
  local last = redis.call('ZRANGE', set, -1, -1)[1]
  if not last then
    last = '0:' .. nonce .. ':'
    redis.call('ZADD', set, 0, last)
  end
  reply[2], reply[3] = 0, last
end
redis.call('PEXPIREAT', set, clock[1] * 1000 + math.floor(clock[2] / 1000) + ttl)
return reply
