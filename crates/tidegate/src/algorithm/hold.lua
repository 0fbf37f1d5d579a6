-- Holds of a group, the twin of store/memory/holds.rs: acquires that an id remembers. Runs
-- before the charges are loaded: returns the units of holds that have ended, and reads those of
-- this call. Defines `holds`, by the number of the charge, and what is done with them.
--
-- Redis: a record per hold, a string of "h", its state and six doubles: units, time of the
-- charge, time to which the units return, end of the hold, the units that remained, and the time
-- of the charge again. Once it is settled, it has the time until which it is known instead of the
-- first time of the charge, and the units that were used instead of the end. It is known until a
-- minute after the end.
--   GET rate_limit:{user123}:per-user:h:job-17
--   ->   "h", 0, 20, 1700000000000000, 1700000000000000, 1700000060000000, 80, 1700000000000000
-- If holds release their units at the end, a sorted set has them by that time:
--   ZRANGE rate_limit:{user123}:per-user:h 0 -1 WITHSCORES
--   ->   job-17*20*1700000000000000 1700000060000000
-- The same set has "*" after a reset, whose score is the time of the reset, above all times: units
-- that were charged before it cannot return.
-- Units in flight have no such set, because their count is one, and no record unless the units or
-- the time of the hold are unusual, or it was renewed.
--
-- general.lua includes this file.
-- inputs
-- luacheck: read globals ACQUIRE PEEK action answer answer_unspent block_count call count expiry
-- luacheck: read globals extend from header hold_count is_count is_time keys load new_quota now
-- luacheck: read globals before_request pack read refund report reserve reset_after resets save
-- luacheck: read globals unpack_struct whole work
-- outputs
-- luacheck: globals holds release_first remember renew repeat_answer settle

local GRACE, MAX_ENDED, MAX_RELEASES, MAX_HOLDS = 60000000, 100, 64, 10000
local OPEN, OPEN_UNTIL_RELEASE, SETTLED, REPORTED, REFUNDED, WAS_UNKNOWN = 0, 1, 2, 3, 4, 5
local HELD, REPLAYED, DONE, ENDED, UNKNOWN, STILL_UNKNOWN = 1, 2, 3, 4, 5, 6
-- The score of "*" is above the time of a reset by this.
local RESET_BASE = 4503599627370496
local CONFLICT = {err = 'HOLDCONFLICT'}

-- Returns the number of ended holds that this request releases at most. A request with many of them
-- gets a few of each further charge: more than it adds.
local function max_ended()
  return math.max(4, MAX_ENDED - math.floor(work - before_request))
end

-- Returns the members of a set that have ended, the first one first.
local function ended_of(set, max)
  return read('ZRANGEBYSCORE', set, '-inf', whole(now), 'WITHSCORES', 'LIMIT', '0', max) or {}
end

-- Shortens the holds that end too late after the clock stepped back.
local function shorten(set, max_ttl)
  local latest = whole(now + max_ttl)
  local found = read('ZRANGEBYSCORE', set, '(' .. latest, '(4503599627370496', 'LIMIT', '0',
    MAX_ENDED) or {}
  for _, member in ipairs(found) do call('ZADD', set, 'XX', latest, member) end
end

-- Removes the holds in flight that have ended. Returns whether there may be more.
local function release_in_flight(key, quota)
  local max, members = max_ended(), {}
  local found = ended_of(key, max)
  for i = 1, #found, 2 do
    -- A member of a log: the policy had another algorithm.
    if string.find(found[i], ':', 1, true) and not string.find(found[i], '*', 1, true) then
      call('UNLINK', key)
      return
    end
    members[#members + 1] = found[i]
  end
  reserve(#members)
  quota.algorithm.remove(key, members)
  return #members == max
end

-- Returns the units of an ended hold to the time of its charge.
local function release(key, set, quota, hold)
  -- First, so that no unit returns twice.
  call('ZREM', set, hold.member)
  local state = hold.units and load(key, quota)
  if state and not state.is_foreign and not quota.algorithm.is_empty(state) then
    quota.algorithm.refund(state, quota, hold.units, hold.refund_at)
    state.is_refund = true
    save(key, state, quota)
  end
end

-- Returns the units of ended holds, the first ones of many. Returns whether there may be more.
local function release_ended(key, set, quota)
  local max, ended = max_ended(), {}
  local found = ended_of(set, max)
  for i = 1, #found, 2 do
    local units, refund_at = string.match(found[i], '%*(%d+)%*(%d+)$')
    ended[#ended + 1] = {
      member = found[i], ends = tonumber(found[i + 1]), units = tonumber(units),
      refund_at = tonumber(refund_at),
    }
  end
  table.sort(ended, function(one, other)
    if one.ends ~= other.ends then return one.ends < other.ends end
    return (one.refund_at or 0) < (other.refund_at or 0)
  end)
  for _, hold in ipairs(ended) do
    if work > MAX_RELEASES then return true end
    release(key, set, quota, hold)
  end
  return #ended == max
end

-- Returns whether a set has as many holds as a key may have.
local function is_full(set)
  local count = read('ZCARD', set) or 0
  return count > MAX_HOLDS or count == MAX_HOLDS and not read('ZSCORE', set, '*')
end

local function read_record(key)
  local value = read('GET', key)
  if not value or #value ~= 50 then return nil end
  local tag, state, units, charged_at, refund_at, end_or_used, remaining, since =
    unpack_struct('<BBdddddd', value)
  local is_ours = tag == 104 and is_count(units) and is_time(charged_at) and is_time(refund_at)
    and is_time(end_or_used) and is_count(remaining) and is_time(since)
  local known_until = state < SETTLED and end_or_used + GRACE or charged_at
  return is_ours and known_until > now and {
    state = state, units = units, charged_at = charged_at, refund_at = refund_at,
    end_or_used = end_or_used, remaining = remaining, since = since,
  } or nil
end

local function write_record(hold, record, ...)
  local value = pack('<BBdddddd', 104, record.state, record.units, record.charged_at,
    record.refund_at, record.end_or_used, record.remaining, record.since)
  call('SET', hold.key, value, ...)
end

local function set_member(hold, record)
  return hold.id .. '*' .. whole(record.units) .. '*' .. whole(record.refund_at)
end

local function extend_set(hold, quota)
  local drain = quota.kind > 5 and quota.option * quota.window / quota.limit or quota.window
  local lives = hold.max_ttl + math.max(GRACE, 2 * math.floor(drain + 1))
  extend(hold.set, expiry(now + lives))
end

-- Returns whether the record is that of a hold that is not settled.
local function is_open(record)
  return record and (record.state == OPEN or record.state == OPEN_UNTIL_RELEASE)
end

-- Finds the hold of this id in flight.
local function find_in_flight(hold, key, quota)
  local record, units = hold.record, 1
  local ends = read('ZSCORE', key, quota.algorithm.member_of(hold.id, 1))
  if not ends and record then
    units = record.units
    ends = read('ZSCORE', key, quota.algorithm.member_of(hold.id, units))
  end
  ends = tonumber(ends or 0)
  -- Of an earlier hold with this id.
  if record and record.end_or_used <= now then hold.record = nil end
  if ends > now then hold.ends, hold.units = ends, units end
end

holds = {}
local hold_key = from + count + block_count
for i = 1, hold_count do
  local at, mode, ttl, max_ttl, default_ttl, has_record, has_set =
    unpack_struct('<ddddddd', header, 81 + 48 * count + 56 * (i - 1))
  local kind, limit, window, option, cost = unpack_struct('<ddddd', header, 33 + 48 * at)
  local key, quota = keys[from + at - 1], new_quota(kind, limit, window, option)
  local hold = {
    mode = mode, ttl = ttl, max_ttl = max_ttl, default_ttl = default_ttl, cost = cost,
    is_in_flight = kind == 8, new_end = now + ttl,
  }
  if has_record == 1 then
    hold.key, hold_key = keys[hold_key], hold_key + 1
    hold.id = string.sub(hold.key, #key + 4)
    hold.record = read_record(hold.key)
  end
  if has_set > 0 then hold.set, hold_key = keys[hold_key], hold_key + 1 end
  if has_set == 1 then
    shorten(hold.set, max_ttl)
    hold.has_ended = release_ended(key, hold.set, quota)
  elseif hold.is_in_flight then
    shorten(key, max_ttl)
    hold.has_ended = release_in_flight(key, quota)
  end
  local record = hold.record
  local is_acquire = action == ACQUIRE or action == PEEK
  if record and hold.set then
    local reset_at = tonumber(read('ZSCORE', hold.set, '*') or 0) - RESET_BASE
    hold.is_before_reset = record.since <= reset_at
  end
  if hold.key and hold.is_in_flight then
    find_in_flight(hold, key, quota)
  elseif is_open(record) then
    hold.ends, hold.units = math.min(record.end_or_used, now + max_ttl), record.units
    if hold.set and record.state == OPEN_UNTIL_RELEASE then
      -- After a reset, or when its units have returned, it is not in the set.
      local member = set_member(hold, record)
      local ends = tonumber(read('ZSCORE', hold.set, member) or nil)
      hold.ends = ends or hold.is_before_reset and hold.ends or now
      if ends and ends <= now then
        local ended = {member = member, units = record.units, refund_at = record.refund_at}
        release(key, hold.set, quota, ended)
      end
    end
    hold.is_ended = hold.ends <= now or hold.is_before_reset and not is_acquire
    if record.state == OPEN and is_acquire then
      -- Of units that stay charged, the id is known for longer than the hold.
      hold.ends = math.max(hold.ends, now)
    elseif hold.is_ended then
      hold.ends = nil
    end
  elseif record and record.state == SETTLED and (record.end_or_used > 0 or record.units == 0) then
    hold.ends, hold.units = now, record.units
  end
  if hold.ends and is_acquire then
    if hold.units ~= cost then error(CONFLICT) end
    hold.is_repeated = true
  elseif hold.set and mode == 1 and is_acquire and is_full(hold.set) then
    hold.rest = math.max(1, (call('ZRANGE', hold.set, '0', '0', 'WITHSCORES')[2] or now) - now)
  end
  holds[at] = hold
end

-- Answers with the earlier decision on this id.
repeat_answer = function(charge)
  local hold, algorithm, state = charge.hold, charge.algorithm, charge.state
  local record, delay = hold.record, 0
  local remaining = algorithm.remaining(state, charge.quota)
  if record and not hold.is_in_flight then
    remaining = record.remaining
    if charge.quota.kind == 7 then delay = math.max(0, record.refund_at - now) end
  end
  answer(1, remaining, 0, reset_after(state, charge.quota, 0), delay)
  hold.status, hold.expires_after = REPLAYED, hold.ends - now
end

-- Plans to remember an acquire.
remember = function(charge, refund_at)
  local hold, cost = charge.hold, charge.cost
  hold.status, hold.expires_after = HELD, hold.mode == 2 and 0 or hold.ttl
  local state = hold.mode == 2 and SETTLED or hold.set and OPEN_UNTIL_RELEASE or OPEN
  local end_or_used = hold.mode == 2 and cost or hold.new_end
  local record = {
    state = state, units = cost, charged_at = hold.mode == 2 and hold.new_end or now,
    refund_at = refund_at, end_or_used = end_or_used, remaining = charge.remaining - cost,
    since = now + resets,
  }
  hold.write = function()
    local usual = hold.is_in_flight and cost == 1 and hold.ttl == hold.default_ttl
    if usual then
      if hold.record then call('UNLINK', hold.key) end
    else
      write_record(hold, record, 'PXAT', expiry(hold.new_end + (hold.mode == 2 and 0 or GRACE)))
    end
    if hold.set and hold.mode == 1 then
      call('ZADD', hold.set, whole(hold.new_end), set_member(hold, record))
      extend_set(hold, charge.quota)
    end
  end
end

-- Settles a hold, or returns all of its units. Returns what it has to write.
settle = function(charge, is_refund)
  local hold, record, used = charge.hold, charge.hold.record, is_refund and 0 or charge.cost
  if hold.is_in_flight then
    if hold.ends then
      local algorithm = charge.quota.algorithm
      charge.state.units = charge.state.units - hold.units
      algorithm.remove(charge.key, {algorithm.member_of(hold.id, hold.units)})
      charge.state.count = charge.state.count - 1
      if record then call('UNLINK', hold.key) end
    end
    hold.status = hold.ends and DONE or UNKNOWN
    return answer_unspent(charge)
  end
  local function with_cost(units, apply)
    if units == 0 then return answer_unspent(charge) end
    charge.cost, charge.fits = units, units <= charge.remaining
    return apply(charge)
  end
  if not record then
    hold.status = UNKNOWN
    if used > 0 then
      -- So that a repetition reports nothing.
      local known_until = now + hold.max_ttl + GRACE
      hold.writes_first = true
      hold.write = function()
        write_record(hold, {
          state = WAS_UNKNOWN, units = used, charged_at = known_until, refund_at = now,
          end_or_used = used, remaining = 0, since = now + resets,
        }, 'PXAT', expiry(known_until))
      end
    end
    return with_cost(used, report)
  end
  local before, state, write = record.state, SETTLED
  charge.since = record.refund_at
  if before == SETTLED and is_refund then
    hold.status, state = DONE, REFUNDED
    write = with_cost(hold.is_before_reset and 0 or record.end_or_used, refund)
  elseif not is_open(record) then
    hold.status = before == REPORTED and ENDED or before == WAS_UNKNOWN and STILL_UNKNOWN or DONE
    return answer_unspent(charge)
  elseif hold.is_before_reset or before == OPEN_UNTIL_RELEASE and hold.is_ended then
    hold.status, state = ENDED, REPORTED
    write = with_cost(used, report)
  else
    hold.status = DONE
    if is_refund then state = REFUNDED end
    if used <= record.units then
      write = with_cost(record.units - used, refund)
    else
      write = with_cost(used - record.units, report)
    end
  end
  -- First, so that no unit returns twice.
  hold.writes_first = true
  hold.write = function()
    if hold.set and record.state == OPEN_UNTIL_RELEASE then
      call('ZREM', hold.set, set_member(hold, record))
    end
    record.charged_at = is_open(record) and record.end_or_used + GRACE or record.charged_at
    record.state, record.end_or_used = state, used
    write_record(hold, record, 'KEEPTTL')
  end
  return write
end

-- Extends a hold that has not ended.
renew = function(charge)
  local hold, record = charge.hold, charge.hold.record
  hold.status = ENDED
  if not hold.ends or record and not is_open(record) then return answer_unspent(charge) end
  record = record or {
    state = OPEN, units = hold.units, charged_at = hold.ends - hold.default_ttl, refund_at = now,
    remaining = 0, since = now,
  }
  local ends = math.max(hold.ends, math.min(hold.new_end, record.charged_at + hold.max_ttl))
  record.end_or_used = ends
  local state, quota = charge.state, charge.quota
  local reset = reset_after(state, quota, 0)
  if hold.is_in_flight then reset = math.max(reset, ends - now) end
  answer(1, charge.algorithm.remaining(state, quota), 0, reset, 0)
  hold.status, hold.expires_after = HELD, ends - now
  hold.write = function()
    write_record(hold, record, 'PXAT', expiry(ends + GRACE))
    if hold.is_in_flight then
      call('ZADD', charge.key, whole(ends), charge.quota.algorithm.member_of(hold.id, hold.units))
      extend(charge.key, charge.algorithm.lives_until(ends))
    elseif hold.set and record.state == OPEN_UNTIL_RELEASE then
      call('ZADD', hold.set, 'XX', whole(ends), set_member(hold, record))
      extend_set(hold, charge.quota)
    end
  end
end

-- Releases units in flight without an id: those that end first, up to 100 holds.
release_first = function(charge)
  local algorithm, left, key = charge.algorithm, charge.cost, charge.key
  local found = call('ZRANGE', key, '0', '99', 'WITHSCORES')
  for i = 1, #found, 2 do
    local member = found[i]
    if left == 0 or member == '*' then break end
    local units = algorithm.units_of(member)
    local taken = math.min(units, left)
    -- First, so that the set, and its expiry, is never gone in between.
    if taken < units then
      local id = string.match(member, '^(.*)%*%d+$')
      algorithm.add(key, id, units - taken, found[i + 1])
    else
      charge.state.count = charge.state.count - 1
    end
    algorithm.remove(key, {member})
    left, charge.state.units = left - taken, charge.state.units - taken
  end
  answer_unspent(charge)
end
