-- concurrency: admits a request if the units in flight plus the cost are at most L. It has no
-- window: a unit counts until it is released, or until its hold ends. In memory, holds.rs does the
-- same.
--
-- Redis: a sorted set with a member per hold, and the end of the hold in microseconds as its score.
-- A member is the id, or "<id>*<units>" if the units are not 1, or the id has an asterisk or a
-- colon. The score of the member "*", above all times, has the units beyond one of all members, so
-- that no call adds them up. The set expires when all holds have ended: at the second full minute
-- after the last end, so that few acquires set it. hold.lua removes holds that have ended.
--   ZRANGE rate_limit:{user123}:exports 0 -1 WITHSCORES
--   ->   job-17 1700000060000000
--        job-18*3 1700000075000000
--        * 4503599627370498
--
-- general.lua includes this file, and says what its functions do.
-- inputs
-- luacheck: read globals call expiry extend now read whole
-- outputs
-- luacheck: globals algorithms work

-- Score of "*" without units: above all times.
local NO_UNITS = 4503599627370496

-- Returns the units of a member.
local function units_of(member)
  return tonumber(string.match(member, '%*(%d+)$')) or 1
end

-- Returns the member of an id.
local function member_of(id, units)
  if units == 1 and not string.find(id, '[*:]') then return id end
  return id .. '*' .. whole(units)
end

-- Adds to the units beyond one of all members.
local function add_units(key, units)
  if units == 0 then return end
  if not call('ZSCORE', key, '*') then
    call('ZADD', key, whole(NO_UNITS + units), '*')
  elseif tonumber(call('ZADD', key, 'INCR', whole(units), '*')) <= NO_UNITS then
    call('ZREM', key, '*')
  end
end

-- Removes holds: a list of members.
local function remove(key, members)
  if #members == 0 then return end
  local units = 0
  for _, member in ipairs(members) do units = units + units_of(member) - 1 end
  call('ZREM', key, unpack(members))
  work = work + #members
  add_units(key, -units)
end

-- Adds a hold.
local function add(key, id, units, ends)
  -- A member whose record is lost is there already.
  if call('ZADD', key, ends, member_of(id, units)) == 1 then add_units(key, units - 1) end
end

-- Returns members with their scores, from this rank on.
local function members_from(key, rank, count)
  return call('ZRANGE', key, rank, rank + count - 1, 'WITHSCORES')
end

-- Returns the end of the hold that ends last.
local function last_end(state)
  local last = state.count > 0 and members_from(state.key, state.count - 1, 1)[2]
  return math.max(now, tonumber(last or now))
end

local function lives_until(ends)
  return expiry(ends - ends % 60000000 + 120000000)
end

algorithms[8] = {
  lives_until = lives_until,
  units_of = units_of,
  member_of = member_of,
  add = add,
  remove = remove,

  load = function(key)
    local count = read('ZCARD', key)
    local state = {key = key, is_foreign = not count, count = count or 0, units = count or 0}
    local extra = state.units > 0 and tonumber(call('ZSCORE', key, '*') or nil)
    if extra then state.units, state.count = state.units - 1 + extra - NO_UNITS, state.count - 1 end
    return state
  end,

  -- A key may have 10,000 holds. A peek of cost 0 asks for no further one.
  remaining = function(state, quota, cost)
    if state.count >= 10000 and cost ~= 0 then return 0 end
    return math.max(0, quota.limit - state.units)
  end,

  level = function(state)
    return state.units
  end,

  overdrawn = function(state, quota)
    return state.units > quota.limit
  end,

  -- The end of the hold after which the cost fits: an upper bound, because a release comes earlier.
  -- If that is not one of the first hundred, the last end.
  retry_after = function(state, quota, cost)
    local needed = math.max(1, state.units + cost - quota.limit)
    if state.count == state.units then
      return math.max(0, (members_from(state.key, needed - 1, 1)[2] or now) - now)
    end
    local found = members_from(state.key, 0, 100)
    work = work + #found / 10
    for i = 1, #found, 2 do
      if found[i] == '*' then break end
      needed = needed - units_of(found[i])
      if needed <= 0 then return math.max(0, found[i + 1] - now) end
    end
    return last_end(state) - now
  end,

  reset_after = function(state, _, extra)
    local ends = last_end(state)
    if extra > 0 then ends = math.max(ends, state.hold.new_end) end
    return math.max(0, ends - now)
  end,

  spend = function(state, _, cost)
    state.units = state.units + cost
  end,

  is_empty = function()
    return false
  end,

  save = function(key, state)
    local hold = state.hold
    add(key, hold.id, hold.cost, whole(hold.new_end))
    extend(key, lives_until(hold.new_end))
  end,
}
