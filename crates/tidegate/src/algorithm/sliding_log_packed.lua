-- sliding-log as a string of packed timestamps: the same decisions as the sorted set, in a fraction
-- of the memory.
--
-- Redis: one of two forms, which differ in the first byte.
-- Short, up to 1024 bytes, as long as every request costs 1. It is read and written as a whole.
--   "q", the width of a time, the newest time in 8 bytes, then the requests in the order of time
--   a request is its time in 4, 5 or 6 bytes (enough for the window; the newest time has the rest)
-- Long:
--   "r", the rest of the header, the requests of the open chunk in the order of time, unused bytes
--   a request of cost 1 is its time; from the first other cost on, a request is its time and the
--   running total of units in 4 bytes
--
-- A chunk has 8,192 requests. A full chunk is sealed: it moves to a separate key,
-- <prefix>:{<key>}%<number>:<policy>, which expires two windows after its newest request, because a
-- header may refer to it until then. Therefore no write copies more than one chunk.
--
-- `first` skips requests that have left the window. A string that fits into one read is rewritten
-- at each write. A longer one is patched in place, and rewritten with some spare capacity when it
-- is full, about once in n/32 writes. All searches are binary. The log expires when its newest
-- request leaves the window.

local SHORT, LONG = 113, 114 -- "q", "r"
local SHORT_HEADER_SIZE = 10
local FIRST_READ = 1024
local pack, unpack_struct, sub = struct.pack, struct.unpack, string.sub

local function width_for(window)
  return window < 4294967296 and 4 or window < 1099511627776 and 5 or 6
end

-- The long form. Every script call creates all its functions, so these are created on demand.
local function make_long_form()
  -- The last two fields are the window that the expiry of the sealed chunks is based on, and the
  -- next chunk to extend after the window was raised.
  local HEADER = '<BBI4I8I8I8I4I4I8I8I4'
  local HEADER_SIZE, WINDOW_OFFSET = 58, 46
  local CHUNK = 8192
  local TOTAL_MODULUS = 4294967296 -- modulus of the running totals
  -- The maximum number of totals that a refund rewrites.
  local MAX_REWRITTEN = 128
  -- If times need more bytes, up to MAX_COPIED requests are copied exactly. A longer log is reduced
  -- to this many BLOCKS, each at the time of its newest request: units then count slightly too
  -- long, never too short.
  local MAX_COPIED, BLOCKS = 512, 64
  -- The maximum numbers of chunks per call that a raised window extends, and that are removed after
  -- they have left the window.
  local MAX_EXTENDED, MAX_UNLINKED = 300, 16

  local function chunk_key(key, number)
    return (string.gsub(key, '}', '}%%' .. number, 1))
  end

  local function chunk_start(index)
    return index - index % CHUNK
  end

  -- Returns the size in bytes of the requests from the start of the chunk up to `index`, exclusive.
  local function bytes_before(log, start, index)
    local narrow = math.min(math.max(log.narrow - start, 0), index - start)
    return narrow * log.width + (index - start - narrow) * (log.width + 4)
  end

  -- Returns a text with `size` bytes of a request from `skip` on, and their position in the text.
  local function bytes(log, index, skip, size)
    local start = chunk_start(index)
    local from = bytes_before(log, start, index) + skip
    local key = log.key
    if start == chunk_start(log.stored) then
      if log.open then return log.open, from + 1 end
      from = from + HEADER_SIZE
      if from + size <= #log.head then return log.head, from + 1 end
    else
      key = chunk_key(key, start / CHUNK)
    end
    local is_cached = log.piece_key == key and from >= log.piece_from
      and from + size <= log.piece_from + #log.piece
    if not is_cached then
      log.piece, log.piece_key, log.piece_from = call('GETRANGE', key, from, from + 255), key, from
    end
    return log.piece, from - log.piece_from + 1
  end

  -- The requests of a missing chunk (its slot is being migrated, or it was evicted) count as if
  -- they were as young as the newest request: that never admits too much, and ends within a window.
  local function time_at(log, index)
    local text, position = bytes(log, index, 0, log.width)
    if #text < position + log.width - 1 then return log.newest end
    return log.newest - (log.newest - unpack_struct(log.time_format, text, position)) % log.modulus
  end

  -- Returns the units from the base of the header up to this request, inclusive.
  local function units_at(log, index)
    if index < log.narrow then return index - log.first + 1 end
    local text, position = bytes(log, index, log.width, 4)
    if #text < position + 3 then return 0 end
    return (unpack_struct('<I4', text, position) - log.base) % TOTAL_MODULUS
  end

  -- Returns the lowest index from `low` to `high` for which the test holds. For `high` it must
  -- hold.
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

  local function set_width(log, width)
    log.width, log.modulus, log.time_format = width, 256 ^ width, '<I' .. width
  end

  -- Returns the requests of the chunk that starts at `start`, up to `index`, exclusive.
  local function text_of(log, start, index)
    local size = bytes_before(log, start, index)
    if size == 0 then return '' end
    if start ~= chunk_start(log.stored) then
      return call('GETRANGE', chunk_key(log.key, start / CHUNK), 0, size - 1)
    end
    if log.open then return sub(log.open, 1, size) end
    if HEADER_SIZE + size <= #log.head then
      return sub(log.head, HEADER_SIZE + 1, HEADER_SIZE + size)
    end
    return call('GETRANGE', log.key, HEADER_SIZE, HEADER_SIZE + size - 1)
  end

  -- Drops the requests from `index` on.
  local function truncate(log, index)
    log.open = text_of(log, chunk_start(index), index)
    log.count, log.stored, log.narrow = index, index, math.min(index, log.narrow)
  end

  -- Returns the capacity to allocate for a string of this many bytes: some spare bytes, rounded up
  -- to a size class of the allocator (four per power of two), minus the header of the string in
  -- Redis.
  local function capacity_for(size)
    size = size * 33 / 32 + 10
    local step = 16
    while step * 8 < size do step = step * 2 end
    return math.ceil(size / step) * step - 10
  end

  local function entry(log, time, units)
    local text = pack(log.time_format, time % log.modulus)
    return units and text .. pack('<I4', (log.base + units) % TOTAL_MODULUS) or text
  end

  -- Rewrites all requests with wider times.
  local function widen(log, width)
    local wider = {base = log.base}
    set_width(wider, width)
    local parts, requests = {}, log.count - log.first
    local narrow = math.max(0, log.narrow - log.first)
    if requests <= MAX_COPIED then
      for index = log.first, log.count - 1 do
        local units = index >= log.narrow and units_at(log, index)
        parts[#parts + 1] = entry(wider, time_at(log, index), units)
      end
    else
      narrow = 0
      for block = 1, BLOCKS do
        local index = log.first + math.ceil(block * requests / BLOCKS) - 1
        parts[block] = entry(wider, time_at(log, index), units_at(log, index))
      end
    end
    log.open, log.first, log.live = table.concat(parts), 0, 0
    log.count, log.stored, log.narrow = #parts, #parts, narrow
    set_width(log, width)
  end

  -- Removes the oldest `units`.
  local function remove_oldest(log, units)
    log.gone, log.units = log.gone + units, log.units - units
    log.live = log.units == 0 and log.count or index_reaching(log, log.gone + 1)
  end

  local function has_sealed_chunks(log)
    return log.first < chunk_start(log.stored)
  end

  -- Extends the expiry of the sealed chunks after the window was raised: the oldest first, a
  -- limited number per call.
  local function extend_chunks(key, log, quota)
    local open = chunk_start(log.stored) / CHUNK
    local from = math.max(floor(log.first / CHUNK), log.extended)
    local to = math.min(open, from + MAX_EXTENDED)
    local expires = whole(expiry(log.newest + 2 * quota.window))
    for number = from, to - 1 do
      call('PEXPIREAT', chunk_key(key, number), expires)
    end
    log.extended = to
    if to == open then log.window, log.extended = quota.window, 0 end
  end

  return {
    -- Converts a short log in memory, because only the long form supports rare actions.
    lengthen = function(key, log)
      log.key, log.head, log.open = key, '', sub(log.short, SHORT_HEADER_SIZE + 1)
      set_width(log, log.width)
      local count = #log.open / log.width
      log.narrow, log.count, log.stored = count, count, count
      log.first, log.base, log.gone = 0, 0, log.live
      log.capacity, log.window, log.extended, log.short = 0, 0, 0, nil
    end,

    -- count: index after the newest request; requests before `narrow` have no total
    -- first: the oldest request in the window at the last write
    -- live: the oldest request in the window now
    -- gone: units from `first` up to `live`, exclusive
    -- units: units in the window
    -- stored: `count` as stored in Redis
    -- open: the requests of the open chunk, if they differ from those in Redis
    load = function(key, head, quota)
      local log = {key = key, head = head, units = 0, gone = 0, live = 0, spent = 0}
      local _, width, stored_units
      _, width, log.capacity, log.narrow, log.count, log.first, log.base, stored_units, log.newest,
        log.window, log.extended = unpack_struct(HEADER, head)
      log.stored = log.count
      set_width(log, width)
      log.live = log.count
      if log.newest + quota.window > now then
        log.stepped_back = log.newest > now
        -- Few requests have left since the last write, so this is a galloping search from `first`
        -- on.
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

    -- Cuts a request out of the open chunk if that changes few totals, or else removes older units.
    refund = function(log, quota, cost, since)
      if since == 0 then return remove_oldest(log, math.min(cost, log.units)) end
      if since + quota.window <= now or since > now or log.newest < since then return end
      local first = search(log.live, log.count - 1, function(i) return time_at(log, i) >= since end)
      local before = first > log.live and units_at(log, first - 1) or log.gone
      local removed = math.min(cost, log.gone + log.units - before)
      if first == log.live then return remove_oldest(log, removed) end
      local last = index_reaching(log, before + removed)
      local start, rewritten = chunk_start(log.count - 1), log.count - math.max(last, log.narrow)
      if first < start or rewritten > MAX_REWRITTEN then return remove_oldest(log, removed) end
      local whole = units_at(log, last) == before + removed
      local kept = whole and last + 1 or last
      local newest = kept == log.count and time_at(log, first - 1) or log.newest
      local tail = {}
      if kept < log.narrow then
        -- Requests without totals are copied unchanged.
        tail[1] = sub(text_of(log, start, log.narrow), bytes_before(log, start, kept) + 1)
      end
      for index = math.max(kept, log.narrow), log.count - 1 do
        tail[#tail + 1] = entry(log, time_at(log, index), units_at(log, index) - removed)
      end
      local gone = kept - first
      log.open = text_of(log, start, first) .. table.concat(tail)
      log.narrow = math.max(math.min(log.narrow, first), log.narrow - gone)
      log.count, log.stored = log.count - gone, log.count - gone
      log.newest, log.units = newest, log.units - removed
      log.stepped_back = newest > now
      if gone == 0 and log.count == start + CHUNK then
        -- The chunk stays sealed.
        local expires = expiry(newest + 2 * math.max(log.window, quota.window))
        call('SET', chunk_key(log.key, start / CHUNK), log.open, 'PXAT', expires)
        log.open = nil
      end
    end,

    extend = function(key, log, quota)
      if has_sealed_chunks(log) and quota.window > log.window then
        extend_chunks(key, log, quota)
        call('SETRANGE', key, WINDOW_OFFSET, pack('<I8I4', log.window, log.extended))
      end
    end,

    save = function(key, log, quota)
      -- Skip requests that have left the window, and remove their sealed chunks.
      local first_chunk = floor(log.first / CHUNK)
      local live_chunk = floor(math.min(log.live, log.stored) / CHUNK)
      for number = first_chunk, math.min(live_chunk, first_chunk + MAX_UNLINKED) - 1 do
        call('UNLINK', chunk_key(key, number))
      end
      log.base, log.first, log.gone = (log.base + log.gone) % TOTAL_MODULUS, log.live, 0
      if log.first == log.count then
        log.narrow, log.count, log.stored, log.open = 0, 0, 0, ''
        log.first, log.live, log.base = 0, 0, 0
      end

      if not has_sealed_chunks(log) then
        log.window, log.extended = quota.window, 0
      elseif quota.window > log.window then
        extend_chunks(key, log, quota)
      end

      -- `kept` units stay as stored, followed by one request of `added` units at `newest`, if any.
      local kept, added = log.units - log.spent, log.spent
      if log.stepped_back then
        -- Replace requests of the future by one request at now.
        local is_future = function(i) return time_at(log, i) > now end
        truncate(log, search(log.first, log.count - 1, is_future))
        local units = kept
        kept = log.count > log.first and units_at(log, log.count - 1) or 0
        added = added + units - kept
      end
      local width = width_for(quota.window)
      if width > log.width then widen(log, width) end
      if added > 0 then log.newest = now end

      local appended, units = '', kept + added
      if added > 0 then
        local is_narrow = added == 1 and log.narrow == log.count
        if is_narrow then log.narrow = log.narrow + 1 end
        appended = entry(log, now, not is_narrow and units)
        log.count = log.count + 1
      end

      -- Only counted denials exceed the limit here, and only the newest L units matter.
      if log.spent > 0 and quota.count_denied and units > quota.limit then
        local surplus = units - quota.limit
        log.first = surplus < kept and index_reaching(log, surplus + 1) or log.count - 1
        log.base, units = (log.base + surplus) % TOTAL_MODULUS, quota.limit
      end

      local expires = whole(expiry(log.newest + quota.window))
      local function header()
        return pack(HEADER, LONG, log.width, log.capacity, log.narrow, log.count, log.first,
          log.base, units, log.newest, log.window, log.extended)
      end
      local start = chunk_start(log.stored)
      local is_full = log.count - start == CHUNK
      local size = HEADER_SIZE + bytes_before(log, start, log.count)
      local dead = log.first > start and bytes_before(log, start, log.first) or 0
      local is_oversized = log.capacity > 1.3 * (size - dead)
        and log.capacity > capacity_for(size - dead)
      if not log.open and log.capacity > FIRST_READ and size <= log.capacity
        and not is_oversized and not is_full then
        if added > 0 then call('SETRANGE', key, size - #appended, appended) end
        call('SETRANGE', key, 0, header())
        call('PEXPIREAT', key, expires)
        return
      end
      local text = text_of(log, start, log.stored) .. appended
      if log.first > start and (not is_full or log.first - start >= CHUNK / 8) then
        -- All requests in the window are in the open chunk: let it start with the oldest.
        text = sub(text, dead + 1)
        log.narrow = math.max(0, log.narrow - log.first)
        log.count, log.first = log.count - log.first, 0
        start, is_full = 0, false
      end
      local has_no_totals = log.narrow == log.count
      if start == 0 and log.first == 0 and has_no_totals
        and SHORT_HEADER_SIZE + #text <= FIRST_READ then
        call('SET', key, pack('<BBI8', SHORT, log.width, log.newest) .. text, 'PXAT', expires)
        return
      end
      if is_full then
        local longest = math.max(log.window, quota.window)
        call('SET', chunk_key(key, start / CHUNK), text, 'PXAT', expiry(log.newest + 2 * longest))
        text = ''
      end
      size = HEADER_SIZE + #text
      log.capacity = size <= FIRST_READ and size or capacity_for(size)
      call('SET', key, header() .. text .. string.rep('\0', log.capacity - size), 'PXAT', expires)
    end,
  }
end
local long_form

-- Prepares the values that all short logs of this quota share.
local function prepare(quota)
  local width = width_for(quota.window)
  quota.width, quota.modulus, quota.time_format = width, 256 ^ width, '<I' .. width
  quota.header = pack('<BBI8', SHORT, width, now)
  quota.stamp = pack(quota.time_format, now % quota.modulus)
  quota.expires = whole(expiry(now + quota.window))
end

algorithms['sliding-log-packed'] = {
  alt_suffix = 'packed',
  supports_count_denied = true,

  -- short: the string; live: index of the oldest request in the window; units: units in the window;
  -- spent: units that save() has to write.
  load = function(key, quota)
    if not quota.width then prepare(quota) end
    local text
    if quota.limit <= 120 then
      -- The log is short, unless the limit was just lowered.
      text = read('GET', key)
    else
      text = read('GETRANGE', key, 0, FIRST_READ - 1)
    end
    local magic, width = string.byte(text or '', 1, 2)
    if magic ~= SHORT or #text <= SHORT_HEADER_SIZE then
      if magic == LONG then
        long_form = long_form or make_long_form()
        return long_form.load(key, text, quota)
      end
      local other_type = text == nil or magic ~= nil
      return {
        short = '', width = quota.width, newest = 0, live = 0, units = 0, spent = 0,
        other_type = other_type, absent = not other_type,
      }
    end
    local newest, live = unpack_struct('<I8', text, 3), 0
    local count = (#text - SHORT_HEADER_SIZE) / width
    local format, modulus = quota.time_format, quota.modulus
    if width ~= quota.width then format, modulus = '<I' .. width, 256 ^ width end
    -- A request is in the window if its age, relative to the newest, is less than this.
    local max_age = newest + quota.window - now
    if max_age <= 0 then
      live = count
    elseif (newest - unpack_struct(format, text, SHORT_HEADER_SIZE + 1)) % modulus >= max_age then
      local high = count - 1
      live = 1
      while live < high do
        local middle = floor((live + high) / 2)
        local position = SHORT_HEADER_SIZE + 1 + middle * width
        local age = (newest - unpack_struct(format, text, position)) % modulus
        if age < max_age then high = middle else live = middle + 1 end
      end
    end
    local log = {
      short = text, width = width, newest = newest, live = live, units = count - live, spent = 0,
    }
    if newest > now then log.stepped_back = true end
    return log
  end,

  remaining = function(log, quota)
    local remaining = quota.limit - log.units
    return remaining > 0 and remaining or 0
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
    local leaves
    if log.short then
      local position = SHORT_HEADER_SIZE + 1 + (log.live + must_leave - 1) * log.width
      local time = unpack_struct('<I' .. log.width, log.short, position)
      leaves = log.newest - (log.newest - time) % 256 ^ log.width
    else
      leaves = long_form.leaves(log, must_leave)
    end
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
    log.spent = cost
    log.units = log.units + cost
  end,

  refund = function(key, log, quota, cost, since)
    long_form = long_form or make_long_form()
    if log.short then long_form.lengthen(key, log) end
    long_form.refund(log, quota, cost, since)
  end,

  is_empty = function(log)
    return log.units == 0
  end,

  extend = function(key, log, quota)
    if not log.short then long_form.extend(key, log, quota) end
  end,

  save = function(key, log, quota)
    local text, spent = log.short, log.spent
    -- A few units that are spent together are written as single requests.
    if text and spent > 0 and spent <= 8 and not log.stepped_back and log.width == quota.width
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
