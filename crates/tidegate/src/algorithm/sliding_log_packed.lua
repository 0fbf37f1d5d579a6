-- sliding-log as a string of packed timestamps: the same answers as the sorted set in a fraction of the memory.
--
-- Redis: a header, then the requests in the order of time, then unused room.
--   a request of cost 1 is its time, in 4, 5 or 6 bytes (enough for the window; the rest of the time follows from the newest)
--   from the first other cost on, each request is its time and the running total of units, in 4 more bytes
-- Requests that have left the window are skipped by `first`; they go when the string is next rewritten. A string that fits
-- into one read is rewritten at each write; a longer one is patched in place, and rewritten, with a little room to
-- grow, when it is full: one copy in some n/32 writes. Searches are binary, so no decision walks the log.
-- It expires when its newest request leaves the window.

local HEADER = '<BBI4I4I4I4I4I4I8'
local HEADER_SIZE = 34
local MAGIC = 112 -- "p"
local FIRST_READ = 1024
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
  local stored = struct.unpack(log.time_format, text, position)
  return log.newest - (log.newest - stored) % log.modulus
end

-- Units from the header's base up to and with this request.
local function units_at(log, index)
  if index < log.narrow then return index - log.first + 1 end
  local from = offset(log, index) + log.width
  local text, position = bytes(log, from, from + 4)
  return (struct.unpack('<I4', text, position) - log.base) % TOTALS
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

local function width_for(window)
  return window < 4294967296 and 4 or window < 1099511627776 and 5 or 6
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
    local text = struct.pack(format, time_at(log, index) % 256 ^ width)
    if index >= log.narrow then text = text .. struct.pack('<I4', (log.base + units_at(log, index)) % TOTALS) end
    parts[#parts + 1] = text
  end
  return table.concat(parts)
end

algorithms['sliding-log-packed'] = {
  counts_denied = true,

  -- count: requests in the string, of which `narrow` have no total; first: the oldest that was in the window at the last
  -- write; live: the oldest that is now; gone: units from first up to there; units: those in the window.
  load = function(key, quota)
    local head = read('GETRANGE', key, 0, FIRST_READ - 1) or ''
    local log = {key = key, head = head, units = 0, gone = 0, live = 0, spent = 0, refunded = 0}
    if #head < HEADER_SIZE or string.byte(head) ~= MAGIC then
      log.head, log.capacity, log.narrow, log.count, log.first, log.base, log.newest = '', 0, 0, 0, 0, 0, 0
      set_width(log, width_for(quota.window))
      return log
    end
    local _, width, stored_units
    _, width, log.capacity, log.narrow, log.count, log.first, log.base, stored_units, log.newest =
      struct.unpack(HEADER, head)
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

  remaining = function(log, quota)
    return math.max(0, quota.limit - log.units)
  end,

  retry_after = function(log, quota, cost)
    -- If this denial counts as well, its own units are the newest, and have to leave last.
    local must_leave = log.units + (quota.count_denied and cost or 0) + cost - quota.limit
    if must_leave > log.units then return quota.window end
    local leaves = time_at(log, index_reaching(log, log.gone + must_leave))
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

    local units, appended = kept + added, struct.pack(log.time_format, newest % log.modulus)
    if added > 1 or log.narrow < log.count then
      appended = appended .. struct.pack('<I4', (log.base + units) % TOTALS)
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
      return struct.pack(HEADER, MAGIC, log.width, log.capacity, log.narrow, log.count, log.first, log.base, units,
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
      text = to <= #log.head and string.sub(log.head, from + 1, to) or call('GETRANGE', key, from, to - 1)
    end
    log.narrow, log.count, log.first = math.max(0, log.narrow - log.first), log.count - log.first, 0
    log.capacity = size <= FIRST_READ and size or roomy(size)
    call('SET', key, header() .. text .. appended .. string.rep('\0', log.capacity - size), 'PXAT', expires)
  end,
}
