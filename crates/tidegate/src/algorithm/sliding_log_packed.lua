-- sliding-log as packed timestamps: the same decisions as the sorted set, in a fraction of the
-- memory.
--
-- Redis: one of two forms.
-- Short, a string of up to 4,096 bytes (16,384 while its slot is migrating), as long as every
-- request costs 1. It is read and written as a whole:
--   "q", the width of a time, two doubles: the time of the oldest request, and the time until which
--   the key lives at least; then the requests in the order of time
--   a request is its time in 4, 5 or 6 bytes (enough for the window; the oldest time has the rest)
-- Long, a hash of chunks of 255 requests. The field "log" has a header and the chunk that is not
-- full yet; a full chunk has its number as its field. Other hashes have no field "log":
--   a request of cost 1 is its time; from the first other cost on, a request is its time and the
--   running total of units in 4 bytes
-- For example, two requests of a window of a minute:
--   GET rate_limit:{user123}:per-user
--   ->   "q", 4, 1700000000000000, 1700000067500000, and 2 * 4 bytes
--
-- The log expires when its newest request has left the window, and up to an eighth of a window
-- later. Within that slack, further requests need not set the expiry again.
--
-- general.lua includes this file, and says what its functions do.
-- inputs
-- luacheck: read globals call expiry floor is_time migration_error now pack read sub unpack_struct
-- luacheck: read globals whole
-- outputs
-- luacheck: globals algorithms work

local SHORT, LONG = 113, 114 -- "q", "r"
local SHORT_HEADER, SHORT_HEADER_SIZE, MAX_SHORT = '<BBdd', 18, 4096
-- While its slot is migrating, a short log cannot become a long one.
local MAX_SHORT_MIGRATING = 16384
-- A long log becomes a short one when it needs no more than this.
local MAX_SHORTENED = 2048
-- tag, width, narrow, count, first, base, units, newest, lives_until, oldest_chunk
local HEADER, HEADER_SIZE = '<BBdddddddd', 66
-- 255 requests of 4, 5, 6, 8 or 10 bytes fill a size class of Redis's allocator.
local CHUNK = 255
local TOTAL_MODULUS = 4294967296 -- modulus of the running totals
-- The maximum numbers of totals and of requests that a refund rewrites.
local MAX_REWRITTEN, MAX_MOVED = 128, 16 * CHUNK
-- If times need more bytes, up to MAX_COPIED requests are copied exactly. A longer log is reduced
-- to this many BLOCKS, each at the time of its newest request: units then count slightly too long,
-- never too short.
local MAX_COPIED, BLOCKS = 512, 64
-- The maximum number of chunks per call that are removed after they have left the window.
local MAX_DROPPED = 64

local function width_for(window)
  return window < 4294967296 and 4 or window < 1099511627776 and 5 or 6
end

local function set_width(log, width)
  log.width, log.modulus, log.time_format = width, 256 ^ width, '<I' .. whole(width)
end

local function chunk_start(index)
  return index - index % CHUNK
end

-- Returns the size in bytes of the requests from `start` up to `index`, exclusive.
local function bytes_between(log, start, index)
  local narrow = math.min(math.max(log.narrow - start, 0), index - start)
  return narrow * log.width + (index - start - narrow) * (log.width + 4)
end

-- Returns the requests of the chunk that starts at `start`.
local function chunk_at(log, start)
  if start == log.open_start then return log.open end
  local text = log.chunks[start]
  if not text then
    text = call('HMGET', log.key, whole(start / CHUNK))[1] or ''
    log.chunks[start] = text
  end
  return text
end

-- A request of a chunk that is missing counts as the newest one.
local function time_at(log, index)
  local start = chunk_start(index)
  local text, position = chunk_at(log, start), bytes_between(log, start, index) + 1
  if #text < position + log.width - 1 then return log.newest end
  local time = unpack_struct(log.time_format, text, position)
  return log.newest - (log.newest - time) % log.modulus
end

-- Returns the units from the base of the header up to this request, inclusive.
local function units_at(log, index)
  if index < log.narrow then return index - log.first + 1 end
  local start = chunk_start(index)
  local text, position = chunk_at(log, start), bytes_between(log, start, index) + log.width + 1
  if #text < position + 3 then return 0 end
  return (unpack_struct('<I4', text, position) - log.base) % TOTAL_MODULUS
end

-- Returns the lowest index from `low` to `high` for which the test holds. For `high` it must hold.
local function search(low, high, test)
  while low < high do
    local middle = floor((low + high) / 2)
    if test(middle) then high = middle else low = middle + 1 end
  end
  return low
end

-- Returns the index of the request that reaches this number of units.
local function index_reaching(log, units)
  local index = log.first + units - 1 -- if every earlier request costs 1
  if index < log.narrow then return index end
  local low = math.max(log.first, log.narrow)
  return search(low, log.count - 1, function(i) return units_at(log, i) >= units end)
end

local function entry(log, time, units)
  local text = pack(log.time_format, time % log.modulus)
  return units and text .. pack('<I4', (log.base + units) % TOTAL_MODULUS) or text
end

-- Returns the requests from the start of a chunk up to `index`, exclusive.
local function text_between(log, start, index)
  local parts = {}
  for at = start, index - 1, CHUNK do
    local to = math.min(at + CHUNK, index)
    parts[#parts + 1] = sub(chunk_at(log, at), 1, bytes_between(log, at, to))
  end
  return table.concat(parts)
end

-- Replaces the requests from the start of a chunk on by this text, which reaches to log.count. The
-- full chunks are written by save().
local function set_text(log, start, text)
  while log.count - start >= CHUNK do
    local size = bytes_between(log, start, start + CHUNK)
    log.chunks[start] = sub(text, 1, size)
    log.changed[start] = true
    work = work + 4
    text, start = sub(text, size + 1), start + CHUNK
  end
  log.open, log.open_start = text, start
end

-- Drops the requests from `index` on.
local function truncate(log, index)
  local start = chunk_start(index)
  local text = text_between(log, start, index)
  log.count, log.narrow = index, math.min(index, log.narrow)
  set_text(log, start, text)
end

-- Starts again with these requests: `parts` has their texts, the first `narrow` without a total.
local function replace(log, parts, narrow)
  log.chunks, log.changed, log.is_replaced = {}, {}, true
  log.first, log.live, log.oldest_chunk = 0, 0, 0
  log.count, log.narrow = #parts, narrow
  set_text(log, 0, table.concat(parts))
end

-- Rewrites all requests with times of another width.
local function set_width_of_times(log, width)
  local other = {base = log.base}
  set_width(other, width)
  local parts, requests = {}, log.count - log.first
  local narrow = math.max(0, log.narrow - log.first)
  work = work + math.min(requests, MAX_COPIED) / 8
  if requests <= MAX_COPIED then
    for index = log.first, log.count - 1 do
      local units = index >= log.narrow and units_at(log, index)
      parts[#parts + 1] = entry(other, time_at(log, index), units)
    end
  else
    narrow = 0
    for block = 1, BLOCKS do
      local index = log.first + math.ceil(block * requests / BLOCKS) - 1
      parts[block] = entry(other, time_at(log, index), units_at(log, index))
    end
  end
  set_width(log, width)
  replace(log, parts, narrow)
end

-- Removes the oldest `units`.
local function remove_oldest(log, units)
  log.gone, log.units = log.gone + units, log.units - units
  log.live = log.units == 0 and log.count or index_reaching(log, log.gone + 1)
end

-- Creates a log from a short string, or an empty one.
local function new_log(key, text, width, newest, lives_until)
  local log = {
    key = key, chunks = {}, changed = {}, newest = newest, first = 0, live = 0, base = 0, gone = 0,
    units = 0, spent = 0, lives_until = lives_until, oldest_chunk = 0, is_short = true,
  }
  set_width(log, width)
  log.count = floor(#text / width)
  log.narrow = log.count
  set_text(log, 0, text)
  return log, log.count
end

-- Reads a log. Also returns its units at the last write.
local function read_log(key, quota)
  local text = read('GET', key)
  if text and #text > SHORT_HEADER_SIZE then
    local tag, width, oldest, lives_until = unpack_struct(SHORT_HEADER, text)
    local is_ours = tag == SHORT and width >= 4 and width <= 6
    if is_ours and (#text - SHORT_HEADER_SIZE) % width == 0 and is_time(oldest)
      and is_time(lives_until) then
      local newest = unpack_struct('<I' .. whole(width), text, #text - width + 1)
      newest = oldest + (newest - oldest) % 256 ^ width
      return new_log(key, sub(text, SHORT_HEADER_SIZE + 1), width, newest, lives_until)
    end
  end
  local head = text == nil and read('HMGET', key, 'log')
  head = head and head[1]
  local tag, width = string.byte(head or '', 1, 2)
  if tag == LONG and #head >= HEADER_SIZE and width >= 4 and width <= 6 then
    local log = new_log(key, '', 4, 0, 0)
    local _, units
    _, _, log.narrow, log.count, log.first, log.base, units, log.newest, log.lives_until,
      log.oldest_chunk = unpack_struct(HEADER, head)
    local is_ours = is_time(units) and log.first <= log.count and log.narrow <= log.count
    local fields = {'narrow', 'count', 'first', 'base', 'newest', 'lives_until', 'oldest_chunk'}
    for _, field in ipairs(fields) do
      is_ours = is_ours and is_time(log[field])
    end
    if is_ours then
      set_width(log, width)
      log.open, log.open_start = sub(head, HEADER_SIZE + 1), chunk_start(log.count)
      log.is_short = false
      return log, units
    end
  end
  local log = new_log(key, '', width_for(quota.window), 0, 0)
  log.is_foreign, log.is_missing = text ~= false, text == false
  return log, 0
end

algorithms[2] = {
  supports_count_denied = true,

  -- count: index after the newest request; requests before `narrow` have no total
  -- first: the oldest request in the window at the last write
  -- live: the oldest request in the window now
  -- gone: units from `first` up to `live`, exclusive
  -- units: units in the window; spent: units that save() has to write
  -- open: the requests of the chunk that is not full; chunks: the others that were read or changed
  load = function(key, quota)
    local log, stored_units = read_log(key, quota)
    log.live = log.count
    if log.count > log.first and log.newest + quota.window > now then
      log.stepped_back = log.newest > now and log.newest
      -- Few requests have left since the last write, so this is a galloping search from `first` on.
      local lives = function(i) return time_at(log, i) + quota.window > now end
      local low, high, step = log.first, log.first, 1
      while high < log.count - 1 and not lives(high) do
        low, high, step = high + 1, math.min(high + step, log.count - 1), step * 2
      end
      log.live = search(low, high, lives)
      if log.live > log.first then log.gone = units_at(log, log.live - 1) end
      log.units = stored_units - log.gone
    end
    log.is_stale = log.lives_until < log.newest + quota.window
    return log
  end,

  remaining = function(log, quota)
    return math.max(0, quota.limit - log.units)
  end,

  level = function(log)
    return log.units
  end,

  overdrawn = function(log, quota)
    return log.units > quota.limit
  end,

  retry_after = function(log, quota, cost, extra)
    local must_leave = log.units + extra + cost - quota.limit
    if must_leave > log.units - log.spent then return quota.window end
    local leaves = time_at(log, index_reaching(log, log.gone + must_leave))
    return math.min(leaves, now) + quota.window - now
  end,

  reset_after = function(log, quota, extra)
    if extra + log.spent > 0 then return quota.window end
    return log.units == 0 and 0 or math.min(log.newest, now) + quota.window - now
  end,

  counts_until = function(log, quota)
    return log.newest + quota.window
  end,

  spend = function(log, quota, cost)
    log.spent = log.spent + cost
    log.units = log.units + cost
  end,

  -- Cuts a request out if that moves few others, or else removes older units.
  refund = function(log, quota, cost, since)
    if since == 0 then return remove_oldest(log, math.min(cost, log.units)) end
    if since + quota.window <= now or since > now or log.newest < since then return end
    local first = search(log.live, log.count - 1, function(i) return time_at(log, i) >= since end)
    local before = first > log.live and units_at(log, first - 1) or log.gone
    local removed = math.min(cost, log.gone + log.units - before)
    if first == log.live then return remove_oldest(log, removed) end
    local last = index_reaching(log, before + removed)
    local start, rewritten = chunk_start(first), log.count - math.max(last, log.narrow)
    if log.count - start > MAX_MOVED or rewritten > MAX_REWRITTEN then
      return remove_oldest(log, removed)
    end
    local kept = units_at(log, last) == before + removed and last + 1 or last
    local newest = kept == log.count and time_at(log, first - 1) or log.newest
    local parts = {text_between(log, start, first)}
    if kept < log.narrow then
      -- Requests without totals are copied unchanged.
      local from = chunk_start(kept)
      parts[2] = sub(text_between(log, from, log.narrow), bytes_between(log, from, kept) + 1)
    end
    for index = math.max(kept, log.narrow), log.count - 1 do
      parts[#parts + 1] = entry(log, time_at(log, index), units_at(log, index) - removed)
    end
    local gone = kept - first
    log.narrow = math.max(math.min(log.narrow, first), log.narrow - gone)
    log.count = log.count - gone
    set_text(log, start, table.concat(parts))
    log.newest, log.units = newest, log.units - removed
    log.stepped_back = newest > now
  end,

  is_empty = function(log)
    return log.units == 0
  end,

  prepare = function(key, log, quota)
    -- Skip requests that have left the window, and remove their chunks.
    log.base, log.first, log.gone = (log.base + log.gone) % TOTAL_MODULUS, log.live, 0
    local width = width_for(quota.window)
    if log.first == log.count then
      replace(log, {}, 0)
      set_width(log, width)
      log.base = 0
    end

    -- `kept` units stay as stored, followed by one request of `added` units at now, if any.
    local kept, added = log.units - log.spent, log.spent
    if log.stepped_back then
      -- Replace requests of the future by one request at now.
      local is_future = function(i) return time_at(log, i) > now end
      truncate(log, search(log.first, log.count - 1, is_future))
      local units = kept
      kept = log.count > log.first and units_at(log, log.count - 1) or 0
      added = added + units - kept
    end
    if width > log.width or width < log.width and log.count - log.first <= MAX_COPIED then
      set_width_of_times(log, width)
    end
    if added > 0 then log.newest = now end
    local units = kept + added
    if added > 0 then
      local is_narrow = log.narrow == log.count and (added == 1 or log.is_short and added <= 8)
      if is_narrow then
        -- A few units that are spent together are single requests.
        log.narrow, log.count = log.narrow + added, log.count + added
        set_text(log, log.open_start, log.open .. string.rep(entry(log, now), added))
      else
        log.count = log.count + 1
        set_text(log, log.open_start, log.open .. entry(log, now, units))
      end
    end

    -- Only counted denials exceed the limit here, and only the newest L units matter.
    if log.spent > 0 and quota.count_denied and units > quota.limit then
      local surplus = units - quota.limit
      log.first = index_reaching(log, surplus + 1)
      log.base, units = (log.base + surplus) % TOTAL_MODULUS, quota.limit
    end

    local lives_until = log.lives_until
    -- No window is longer than 3.2e13 microseconds.
    if lives_until < log.newest + quota.window or lives_until > log.newest + 1e14 then
      lives_until = log.newest + quota.window + floor(quota.window / 8)
    end
    log.new_units, log.new_lives_until = units, lives_until
    local size = SHORT_HEADER_SIZE + (log.count - log.first) * log.width
    local has_no_totals = log.narrow == log.count
    local is_short = has_no_totals and (log.is_short and size <= MAX_SHORT
      or log.first >= log.open_start and size <= MAX_SHORTENED)
    -- Only UNLINK makes room for a hash, and it frees a large one in the background; SET would not.
    log.is_new = log.is_foreign or is_short ~= log.is_short or log.is_replaced and not is_short
    log.must_unlink = log.is_new and not log.is_missing
    if log.must_unlink and not (log.is_foreign or log.is_replaced) and migration_error(key) then
      -- The form stays, unless that of a string becomes too long.
      is_short = log.is_short
      log.is_new = is_short and not (has_no_totals and size <= MAX_SHORT_MIGRATING)
      log.must_unlink = log.is_new
    end
    log.saves_short = is_short
  end,

  save = function(key, log)
    local lives_until = log.new_lives_until
    if log.saves_short then
      local start = chunk_start(log.first)
      local text = text_between(log, start, log.count)
      text = sub(text, bytes_between(log, start, log.first) + 1)
      local header = pack(SHORT_HEADER, SHORT, log.width, time_at(log, log.first), lives_until)
      call('SET', key, header .. text, 'PXAT', expiry(lives_until))
      return
    end

    local dropped = {}
    if not log.is_new then
      local last = math.min(floor(log.first / CHUNK), log.oldest_chunk + MAX_DROPPED) - 1
      for number = log.oldest_chunk, last do dropped[#dropped + 1] = whole(number) end
      log.oldest_chunk = log.oldest_chunk + #dropped
    end
    local fields = {'log', pack(HEADER, LONG, log.width, log.narrow, log.count, log.first, log.base,
      log.new_units, log.newest, lives_until, log.oldest_chunk) .. log.open}
    -- A sliding counter has another value there, so it never mistakes this hash for its own.
    if log.is_new then fields[3], fields[4] = 'window', 'packed' end
    for start in pairs(log.changed) do
      fields[#fields + 1], fields[#fields + 2] = whole(start / CHUNK), log.chunks[start]
    end
    call('HSET', key, unpack(fields))
    if #dropped > 0 then call('HDEL', key, unpack(dropped)) end
    if log.is_new or lives_until ~= log.lives_until then
      call('PEXPIREAT', key, expiry(lives_until))
    end
  end,
}
