-- Exact integers. general.lua includes this file.
-- inputs
-- luacheck: read globals floor
-- outputs
-- luacheck: globals whole mul_div_rem mul_div_ceil
--
-- A Lua number is a double: integers are exact below 2^53. Times in microseconds since the epoch
-- are near 2^51, limits at most 10^12 < 2^40, windows at most 366 days < 2^45, so only products can
-- lose precision.

-- Formats an integer with all of its digits.
function whole(number)
  return string.format('%.0f', number)
end

-- Returns the exact quotient and remainder of a * b / m. b and m must be below 2^45, a and the
-- quotient below 2^53.
function mul_div_rem(a, b, m)
  local product = a * b
  if product < 4503599627370496 then -- 2^52: the product is exact, and so is its division
    local quotient = floor(product / m)
    return quotient, product - quotient * m
  end
  -- Long division, digit by digit of a in base 128: each step stays below 2^53.
  local digits, count = {}, 0
  repeat
    local higher = floor(a / 128)
    count = count + 1
    digits[count] = a - higher * 128
    a = higher
  until a == 0
  local quotient, rest = 0, 0
  for i = count, 1, -1 do
    local step = rest * 128 + digits[i] * b
    local times = floor(step / m)
    quotient = quotient * 128 + times
    rest = step - times * m
  end
  return quotient, rest
end

function mul_div_ceil(a, b, m)
  local quotient, rest = mul_div_rem(a, b, m)
  return rest > 0 and quotient + 1 or quotient
end
