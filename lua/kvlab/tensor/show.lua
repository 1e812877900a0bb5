--- Prints a tensor as Torch does: with a common scale factor, columns wrapped to the
-- width of a terminal, long dims cut in the middle, and a last line with dtype, shape and
-- device.
local EDGE, LIMIT, WIDTH = 3, 1000, 80

local function is_whole(x) return x == math.floor(x) and math.abs(x) < 1e9 end

--- The digits of a 64-bit integer, without the LL or ULL behind them.
local function digits_of(x) return (tostring(x):gsub("U?LL$", "")) end

local function has_wide(values)
  for _, x in ipairs(values) do if type(x) == "cdata" then return true end end
  return false
end

--- A format for text: these values are written with all their digits.
local function choose_wide(values)
  local most = 0
  for _, x in ipairs(values) do most = math.max(most, #digits_of(x)) end
  return "%" .. math.max(most + 1, 4) .. "s"
end

--- Chooses a format that fits every value, and the scale that values are divided by; no
-- scale: 64-bit integers, which are written as text.
local function choose_format(values)
  if has_wide(values) then return choose_wide(values), nil end
  local whole, largest, smallest = true, 0, math.huge
  for _, x in ipairs(values) do
    if x == x and math.abs(x) ~= math.huge then
      local size = math.abs(x)
      whole = whole and is_whole(x)
      largest = math.max(largest, size)
      if size > 0 then smallest = math.min(smallest, size) end
    end
  end
  local digits = largest >= 1 and math.floor(math.log10(largest)) + 1 or 1
  if whole then return "%" .. math.max(digits + 1, 4) .. ".0f", 1 end
  if largest >= 1e5 or largest < 1e-4 or largest / smallest > 1e8 then
    local scale = 10 ^ math.floor(math.log10(largest))
    return "%8.4f", scale
  end
  return "%" .. (digits + 6) .. ".4f", 1
end

local function format_number(x, format, scale)
  if not scale then return (format:format(digits_of(x))) end
  if x ~= x then return (" "):rep(tonumber(format:match "%%(%d+)") - 3) .. "nan" end
  return (format:format(x / scale))
end

--- Which of n entries to print; 0 stands for the gap.
local function shown(n, cut)
  local list = {}
  if not cut or n <= 2 * EDGE + 1 then
    for i = 1, n do list[i] = i end
    return list
  end
  for i = 1, EDGE do list[i] = i end
  list[#list + 1] = 0
  for i = n - EDGE + 1, n do list[#list + 1] = i end
  return list
end

local function add_matrix(lines, values, at, rows, columns, format, scale, cut)
  local width = #format_number(0, format, scale) + 1
  local columns_shown = shown(columns, cut)
  local per_page = math.max(1, math.floor(WIDTH / width))
  for first = 1, #columns_shown, per_page do
    local last = math.min(first + per_page - 1, #columns_shown)
    if #columns_shown > per_page then
      lines[#lines + 1] = ("Columns %d to %d"):format(columns_shown[first] - 1,
                                                      columns_shown[last] - 1)
    end
    for _, r in ipairs(shown(rows, cut)) do
      local words = {}
      for c = first, last do
        local column = columns_shown[c]
        words[#words + 1] = (r == 0 or column == 0) and (" "):rep(width - 3) .. ".."
          or format_number(values[at + (r - 1) * columns + column], format, scale)
      end
      lines[#lines + 1] = table.concat(words, " ")
    end
  end
end

--- "(1,2,.,.)": the leading dims of matrix number i.
local function matrix_name(i, dims)
  local words = {}
  for d = #dims - 2, 1, -1 do
    words[d] = i % dims[d]
    i = math.floor(i / dims[d])
  end
  return "(" .. table.concat(words, ",") .. ",.,.) ="
end

local function footer(t, dims)
  return ("[%s tensor of shape [%s] on %s]"):format(t:type(), table.concat(dims, ", "),
    t.device:name())
end

return function(t)
  if t.storage == nil then return "[closed tensor]" end
  local dims = t:dims()
  if t.count == 0 then return footer(t, dims) end
  local values = t:list()
  if t.ndim == 0 then
    local x = values[1]
    return ("%s  %s"):format(type(x) == "cdata" and digits_of(x) or ("%.6g"):format(x),
      footer(t, dims))
  end
  local lines, cut = {}, #values > LIMIT
  local format, scale = choose_format(values)
  if scale and scale ~= 1 then lines[1] = ("%.0e *"):format(scale) end
  local rows = t.ndim > 1 and dims[#dims - 1] or dims[1]
  local columns = t.ndim > 1 and dims[#dims] or 1
  local matrices = #values / (rows * columns)
  for _, m in ipairs(shown(matrices, cut)) do
    if m == 0 then
      lines[#lines + 1] = "..."
    else
      if t.ndim > 2 then lines[#lines + 1] = matrix_name(m - 1, dims) end
      add_matrix(lines, values, (m - 1) * rows * columns, rows, columns, format, scale,
        cut)
    end
  end
  lines[#lines + 1] = footer(t, dims)
  return table.concat(lines, "\n")
end
