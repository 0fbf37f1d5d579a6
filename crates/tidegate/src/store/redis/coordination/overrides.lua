-- Changes one of the overrides that all instances share, or reads those that have changed.
--
-- KEYS   1  version: <number>:<nonce> of the last change
--        2  hash of the entries: field = name of an override, value = <end>:<text>; the end is in
--           microseconds of the server's clock, 0 for none
--        3  sorted set of their names: score = number of the last change
--        4  sorted set of the last changes: score = number, member = <number>:<nonce>:<record>. A
--           record is a list of texts, each after its length and a colon: the name, the time, the
--           values before and after (empty for none), and who did it
-- ARGV   1  set | remove | changes | entries | audit
--        2  TTL of the keys in milliseconds, from the last call on
--        set, remove:  3  nonce: differs in every call
--                      4  maximum number of entries
--                      5  maximum number of changes to keep
--                      6  name
--                      7  who does it
--                      8  time until the end in milliseconds, 0 for none; '' to remove it
--                      9  text
--                     10  and so on: names whose entries may have ended, which are deleted then
--        changes:      3  maximum number to return
--                      4  version that the caller knows
--        entries:      3  maximum number to return
--                      4  number after which they are returned, 0 for the first call
--        audit:        3  maximum number to return, the latest ones
--                      4  number before which they are returned, +inf for the first call
-- reply  set, remove:  1 and the new version; 0 if there is nothing to remove, or no room
--        changes:      version, or '' if nothing was ever changed, or all was lost; 1, or 0 if the
--                      version is not among the last changes; then the changes after it
--        entries:      version; then number, name and value of each
--        audit:        the changes in their order
--
-- Entries are read by the numbers of their changes, so that changes between two calls neither hide
-- an entry nor shift the others: they are among the changes since the first call.

local operation, max = ARGV[1], tonumber(ARGV[3])
local clock = redis.call('TIME')
local now = clock[1] * 1000000 + clock[2]
local version = redis.call('GET', KEYS[1])

local function extend()
  local expires_at = math.ceil(now / 1000) + ARGV[2]
  for i = 1, 4 do redis.call('PEXPIREAT', KEYS[i], expires_at) end
end

local function has_ended(value)
  local ends = tonumber(string.match(value, '^%d+'))
  return ends > 0 and ends <= now
end

if operation == 'set' or operation == 'remove' then
  -- The rest of a history without its version would be in force again.
  if not version then redis.call('UNLINK', KEYS[2], KEYS[3], KEYS[4]) end
  local name, after = ARGV[6], ''
  local before = redis.call('HMGET', KEYS[2], name)[1]
  if before and has_ended(before) then before = false end
  if operation == 'remove' and not before then return {0, version or ''} end
  for i = 10, #ARGV do
    local value = redis.call('HMGET', KEYS[2], ARGV[i])[1]
    if value and has_ended(value) then
      redis.call('HDEL', KEYS[2], ARGV[i])
      redis.call('ZREM', KEYS[3], ARGV[i])
    end
  end
  local number = (version and tonumber(string.match(version, '^%d+')) or 0) + 1
  if operation == 'set' then
    local is_new = not redis.call('ZSCORE', KEYS[3], name)
    if is_new and redis.call('ZCARD', KEYS[3]) >= tonumber(ARGV[4]) then
      return {0, version or ''}
    end
    local ends = tonumber(ARGV[8])
    if ends > 0 then ends = now + ends * 1000 end
    after = string.format('%.0f:%s', ends, ARGV[9])
    redis.call('HSET', KEYS[2], name, after)
    redis.call('ZADD', KEYS[3], number, name)
  else
    redis.call('HDEL', KEYS[2], name)
    redis.call('ZREM', KEYS[3], name)
  end
  version = string.format('%.0f:%s', number, ARGV[3])
  local member = version .. ':'
  for _, text in ipairs({name, string.format('%.0f', now), before or '', after, ARGV[7]}) do
    member = member .. #text .. ':' .. text
  end
  redis.call('SET', KEYS[1], version)
  redis.call('ZADD', KEYS[4], number, member)
  redis.call('ZREMRANGEBYRANK', KEYS[4], 0, -1 - tonumber(ARGV[5]))
  extend()
  return {1, version}
end

if operation == 'audit' then
  local before = '(' .. ARGV[4]
  local older = redis.call('ZCOUNT', KEYS[4], '-inf', before)
  if older == 0 then return {} end
  return redis.call('ZRANGE', KEYS[4], math.max(older - max, 0), older - 1)
end

if not version then return {'', 0} end
extend()
local known = ARGV[4]
if operation == 'changes' then
  local first = string.match(known, '^%d+')
  local reply = {version, 0}
  local since = first and redis.call('ZRANGEBYSCORE', KEYS[4], first, '+inf', 'LIMIT', 0, max + 1)
  if since and since[1] and string.sub(since[1], 1, #known + 1) == known .. ':' then
    reply[2] = 1
    for i = 2, #since do reply[i + 1] = since[i] end
  end
  return reply
end

local found =
  redis.call('ZRANGEBYSCORE', KEYS[3], '(' .. known, '+inf', 'WITHSCORES', 'LIMIT', 0, max)
local names, reply = {}, {version}
for i = 1, #found, 2 do names[#names + 1] = found[i] end
local values = #names > 0 and redis.call('HMGET', KEYS[2], unpack(names))
for i, name in ipairs(names) do
  reply[3 * i - 1], reply[3 * i], reply[3 * i + 1] = found[2 * i], name, values[i] or ''
end
return reply
