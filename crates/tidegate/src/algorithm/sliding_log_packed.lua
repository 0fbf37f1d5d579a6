-- sliding-log as a string of packed timestamps: the same answers as the sorted set in a fraction of the memory.
--
-- Redis: one of two forms, told apart by their first byte.
-- Short, up to 1024 bytes, as long as every request costs 1: read and written as a whole.
--   "q", the width of a time, the newest time in 8 bytes, then the requests in the order of time
--   a request is its time, in 4, 5 or 6 bytes (enough for the window; the rest of the time follows from the newest)
-- Long:
--   "p" and the rest of a header, then the requests in the order of time, then unused room
--   a request of cost 1 is its time; from the first other cost on, each is its time and the running total of units, in
--   4 more bytes
-- In the long form requests that have left the window are skipped by `first`; they go when the string is next rewritten. A
-- string that fits into one read is rewritten at each write; a longer one is patched in place, and rewritten, with a little
-- room to grow, when it is full: one copy in some n/32 writes. Searches are binary, so no decision walks the log.
-- It expires when its newest request leaves the window.

local SHORT, LONG = 113, 112 -- "q", "p"
local SHORT_HEADER_SIZE, LONG_HEADER_SIZE = 10, 34
local FIRST_READ = 1024
local pack, unpack_struct, sub = struct.pack, struct.unpack, string.sub

local function width_for(window)
  return window < 4294967296 and 4 or window < 1099511627776 and 5 or 6
end

-- The long form. Lua makes functions anew at every call, so these only when they are needed.
local function make_long_form()
  local HEADER = '<BBI4I4I4I4I4I4I8'
  local HEADER_SIZE = LONG_HEADER_SIZE
  local TOTALS = 4294967296 -- running totals are kept modulo 2^32

  local function offset(log, index)
    if index <= log.narrow then return HEADER_SIZE + index * log.width end
    return HEADER_SIZE + log.narrow * log.width + (index - log.narrow) * (log.width + 4)
  end

  -- The bytes from `from` to before `to`, and the position of the first of them.
  local function bytes(log, from, to)
    if to <= #log.head then return log.head, from + 1 end
    if not (log.piece and from >= log.piece_from and to <= log.piece_from + #log.piece) then
      log.piece, log.piece_from = call('GETRANGE', log.key, from, math.max(to, from + 256) - 1), from
    end
    return log.piece, from - log.piece_from + 1
  end

  local function time_at(log, index)
    local from = offset(log, index)
    local text, position = bytes(log, from, from + log.width)
    local stored = unpack_struct(log.time_format, text, position)
    return log.newest - (log.newest - stored) % log.modulus
  end

  -- Units from the header's base up to and with this request.
  local function units_at(log, index)
    if index < log.narrow then return index - log.first + 1 end
    local from = offset(log, index) + log.width
    local text, position = bytes(log, from, from + 4)
    return (unpack_struct('<I4', text, position) - log.base) % TOTALS
  end

  -- The lowest index from `low` to `high` for which the test holds; it is known to hold for `high`.
  local function search(low, high, test)
    while low < high do
      local middle = floor((low + high) / 2)
      if test(middle) then high = middle else low = middle + 1 end
    end
    return low
  end

  -- The request with which so many units are reached.
  local function index_reaching(log, units)
    local index = log.first + units - 1 -- where it is if every request before costs 1
    if index < log.narrow then return index end
    return search(math.max(log.first, log.narrow), log.count - 1, function(i) return units_at(log, i) >= units end)
  end

  local function set_width(log, width)
    log.width, log.modulus, log.time_format = width, 256 ^ width, '<I' .. width
  end

  -- How long to make a string of so many bytes: a little room, then up to what the allocator would round up to anyway
  -- (four sizes to each power of two), less the string's own header in Redis.
  local function roomy(size)
    size = size * 33 / 32 + 10
    local step = 16
    while step * 8 < size do step = step * 2 end
    return math.ceil(size / step) * step - 10
  end

  -- The requests from the first on with times of another width.
  local function widened(log, width)
    local parts, format = {}, '<I' .. width
    for index = log.first, log.count - 1 do
      local text = pack(format, time_at(log, index) % 256 ^ width)
      if index >= log.narrow then text = text .. pack('<I4', (log.base + units_at(log, index)) % TOTALS) end
      parts[#parts + 1] = text
    end
    return table.concat(parts)
  end

  return {
    -- A short log, for what is not done every day.
    lengthen = function(key, log)
      local text = log.short
      log.key, log.head = key, string.rep('\0', HEADER_SIZE) .. sub(text, SHORT_HEADER_SIZE + 1)
      set_width(log, log.width)
      local count = (#log.head - HEADER_SIZE) / log.width
      log.capacity, log.narrow, log.count, log.first, log.base, log.gone = 0, count, count, 0, 0, log.live
      log.short = nil
    end,

    -- count: requests in the string, of which `narrow` have no total; first: the oldest that was in the window at the last
    -- write; live: the oldest that is now; gone: units from first up to there; units: those in the window.
    load = function(key, head, quota)
      local log = {key = key, head = head, units = 0, gone = 0, live = 0, spent = 0, refunded = 0}
      local _, width, stored_units
      _, width, log.capacity, log.narrow, log.count, log.first, log.base, stored_units, log.newest =
        unpack_struct(HEADER, head)
      set_width(log, width)
      log.live = log.count
      if log.newest + quota.window > now then
        log.stepped_back = log.newest > now
        -- Few have left since the last write, so the search starts at the first and doubles its steps.
        local lives = function(i) return time_at(log, i) + quota.window > now end
        local low, high, step = log.first, log.first, 1
        while high < log.count - 1 and not lives(high) do
          low, high, step = high + 1, math.min(high + step, log.count - 1), step * 2
        end
        log.live = search(low, high, lives)
        if log.live > log.first then log.gone = units_at(log, log.live - 1) end
        log.units = stored_units - log.gone
      end
      return log
    end,

    leaves = function(log, units)
      return time_at(log, index_reaching(log, log.gone + units))
    end,

    save = function(key, log, quota)
      -- What has left the window is skipped from now on.
      log.base, log.first, log.gone = (log.base + log.gone) % TOTALS, log.live, 0
      if log.first == log.count then log.narrow, log.count, log.first, log.base = 0, 0, 0, 0 end

      -- `kept` units stay as they are stored; after them comes one request of `added` units at `newest`, if any.
      local kept, added, newest = log.units - log.spent + log.refunded, log.spent, log.newest
      local function keep(count)
        log.count, log.narrow = count, math.min(count, log.narrow)
        kept = count > log.first and units_at(log, count - 1) or 0
      end
      if log.spent > 0 then newest = now end
      if log.stepped_back then
        -- What lies in the future becomes one request at now.
        local units = kept
        keep(search(log.first, log.count - 1, function(i) return time_at(log, i) > now end))
        added, newest = added + units - kept, now
      end
      if log.refunded >= added then
        -- The newest request that is left over is written anew, with what is left of it.
        local left = kept + added - log.refunded
        local index = index_reaching(log, left)
        newest = time_at(log, index)
        keep(index)
        added = left - kept
      else
        added = added - log.refunded
      end

      local width = width_for(quota.window)
      local widens = width > log.width
      if widens then
        log.head = string.rep('\0', HEADER_SIZE) .. widened(log, width)
        log.narrow, log.count, log.first = math.max(0, log.narrow - log.first), log.count - log.first, 0
        set_width(log, width)
      end

      local units, appended = kept + added, pack(log.time_format, newest % log.modulus)
      if added > 1 or log.narrow < log.count then
        appended = appended .. pack('<I4', (log.base + units) % TOTALS)
      else
        log.narrow = log.narrow + 1
      end
      log.count = log.count + 1

      -- Only denials that count get here with more than the limit. The newest L units say all that matters.
      if log.spent > 0 and quota.count_denied and units > quota.limit then
        local surplus = units - quota.limit
        local first = surplus < kept and index_reaching(log, surplus + 1) or log.count - 1
        log.first, log.base, units = first, (log.base + surplus) % TOTALS, quota.limit
      end

      log.newest = newest
      local from, to = offset(log, log.first), offset(log, log.count)
      local size = HEADER_SIZE + to - from
      local expires = expiry(newest + quota.window)
      local function header()
        return pack(HEADER, LONG, log.width, log.capacity, log.narrow, log.count, log.first, log.base, units,
          newest)
      end
      local wasteful = log.capacity > 1.3 * size and log.capacity > roomy(size)
      if log.capacity > FIRST_READ and to <= log.capacity and not wasteful and not widens then
        call('SETRANGE', key, to - #appended, appended)
        call('SETRANGE', key, 0, header())
        call('PEXPIREAT', key, expires)
        return
      end
      to = to - #appended
      local text = ''
      if to > from then
        text = to <= #log.head and sub(log.head, from + 1, to) or call('GETRANGE', key, from, to - 1)
      end
      log.narrow, log.count, log.first = math.max(0, log.narrow - log.first), log.count - log.first, 0
      if log.narrow == log.count and SHORT_HEADER_SIZE + to - from + #appended <= FIRST_READ then
        call('SET', key, pack('<BBI8', SHORT, log.width, newest) .. text .. appended, 'PXAT', expires)
        return
      end
      log.capacity = size <= FIRST_READ and size or roomy(size)
      call('SET', key, header() .. text .. appended .. string.rep('\0', log.capacity - size), 'PXAT', expires)
    end,
  }
end
local long_form

-- What all short logs that take something now, under this quota, have in common.
local function prepare(quota)
  local width = width_for(quota.window)
  quota.width, quota.modulus, quota.time_format = width, 256 ^ width, '<I' .. width
  quota.header = pack('<BBI8', SHORT, width, now)
  quota.stamp = pack(quota.time_format, now % quota.modulus)
  quota.expires = whole(expiry(now + quota.window))
end

algorithms['sliding-log-packed'] = {
  aside = 'packed',
  counts_denied = true,

  -- short: the string; live: the oldest request in the window, from 0; units: those in the window; spent, refunded: what
  -- save() has to write.
  load = function(key, quota)
    if not quota.width then prepare(quota) end
    local text
    if quota.limit <= 120 then
      -- It is short, but just after a limit was lowered.
      text = read('GET', key)
    else
      text = read('GETRANGE', key, 0, FIRST_READ - 1)
    end
    local magic, width = string.byte(text or '', 1, 2)
    if magic ~= SHORT or #text <= SHORT_HEADER_SIZE then
      if magic == LONG and #text >= LONG_HEADER_SIZE then
        long_form = long_form or make_long_form()
        return long_form.load(key, text, quota)
      end
      local foreign = text == nil or magic ~= nil
      return {short = '', width = quota.width, newest = 0, live = 0, units = 0, spent = 0, refunded = 0, foreign = foreign}
    end
    local newest, count, live = unpack_struct('<I8', text, 3), (#text - SHORT_HEADER_SIZE) / width, 0
    local format, modulus = quota.time_format, quota.modulus
    if width ~= quota.width then format, modulus = '<I' .. width, 256 ^ width end
    -- A request is in the window if it is older than the newest by less than this.
    local reach = newest + quota.window - now
    if reach <= 0 then
      live = count
    elseif (newest - unpack_struct(format, text, SHORT_HEADER_SIZE + 1)) % modulus >= reach then
      local high = count - 1
      live = 1
      while live < high do
        local middle = floor((live + high) / 2)
        local age = (newest - unpack_struct(format, text, SHORT_HEADER_SIZE + 1 + middle * width)) % modulus
        if age < reach then high = middle else live = middle + 1 end
      end
    end
    local log = {short = text, width = width, newest = newest, live = live, units = count - live, spent = 0, refunded = 0}
    if newest > now then log.stepped_back = true end
    return log
  end,

  remaining = function(log, quota)
    local remaining = quota.limit - log.units
    return remaining > 0 and remaining or 0
  end,

  retry_after = function(log, quota, cost)
    -- If this denial counts as well, its own units are the newest, and have to leave last.
    local must_leave = log.units + (quota.count_denied and cost or 0) + cost - quota.limit
    if must_leave > log.units then return quota.window end
    local leaves
    if log.short then
      local from = SHORT_HEADER_SIZE + 1 + (log.live + must_leave - 1) * log.width
      leaves = log.newest - (log.newest - unpack_struct('<I' .. log.width, log.short, from)) % 256 ^ log.width
    else
      leaves = long_form.leaves(log, must_leave)
    end
    return math.min(leaves, now) + quota.window - now
  end,

  reset_after = function(log, quota, extra)
    if extra > 0 then return quota.window end
    return log.units == 0 and 0 or math.min(log.newest, now) + quota.window - now
  end,

  spend = function(log, quota, cost)
    log.spent = cost
    log.units = log.units + cost
  end,

  refund = function(log, quota, cost)
    log.refunded = math.min(cost, log.units)
    log.units = log.units - log.refunded
  end,

  is_empty = function(log)
    return log.units == 0
  end,

  save = function(key, log, quota)
    local text, spent = log.short, log.spent
    -- A few units that come together are still written as single requests.
    if text and spent > 0 and spent <= 8 and log.refunded == 0 and not log.stepped_back and log.width == quota.width
      and SHORT_HEADER_SIZE + log.units * log.width <= FIRST_READ
      and not (quota.count_denied and log.units > quota.limit) then
      local kept = sub(text, SHORT_HEADER_SIZE + 1 + log.live * log.width)
      local stamp = spent == 1 and quota.stamp or string.rep(quota.stamp, spent)
      call('SET', key, quota.header .. kept .. stamp, 'PXAT', quota.expires)
      return
    end
    long_form = long_form or make_long_form()
    if text then long_form.lengthen(key, log) end
    long_form.save(key, log, quota)
  end,
}
