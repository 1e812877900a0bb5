--- What `t.name`, `t[i]` and `t["1:3, 0"]` mean if a tensor has no field and no method of
-- that name. Entries count from 0, and from the end with a negative number. An entry that
-- is not there is an error.
--
--   t.shape         the sizes of the dims (tensor/sizes.lua)
--   t[1]            entry 1 of dim 0: a view with one dim less
--   t["1:3"]        entries 1 and 2 of dim 0
--   t["1:"]         all entries of dim 0 but the first
--   t[":, -1"]      the last entry of dim 1, for every entry of dim 0
--   t[1] = 0        writes a number, or a tensor of the same dtype and number of elements
--
-- A part of dim 0, or of the first dim that is not chosen by a single entry, is a view of
-- the same memory. Any other part is a copy, because tensors are contiguous; so it cannot
-- be assigned to.
local ffi = require "ffi"
local hint = require("kvlab.words").hint
local options = require "kvlab.options"
local sizes = require "kvlab.tensor.sizes"
local sorted = require "kvlab.sorted"

local int64_t = ffi.typeof "int64_t"
local FIELDS = { "count", "device", "dtype", "ndim", "ptr", "shape", "storage" }

-- Names that other libraries use, and kvlab's names.
local ELSEWHERE = {
  T = "t:transpose()", view = "t:reshape", flatten = "t:reshape { -1 }",
  squeeze = "t:reshape", unsqueeze = "t:reshape", permute = "t:transpose",
  numel = "t.count", dim = "t.ndim", cpu = 't:to "cpu"', cuda = 't:to "cuda"',
  float = 't:cast "f32"', half = 't:cast "f16"', tolist = "t:list()", astype = "t:cast",
  slice = 't["1:3"] or t:narrow', copy = "t:clone()", zero_ = "t:fill_(0)",
}

--- Adds what is above to the module of tensors.
return function(tensor)
  local methods = tensor.methods

  local function refuse(name)
    local names = sorted.keys(methods)
    for _, field in ipairs(FIELDS) do names[#names + 1] = field end
    local other = ELSEWHERE[name]
    if type(name) ~= "string" then
      options.fail(("t[%s]: expected a number, a text such as \"0, 1:3\", or the name "
        .. "of a method or a field"):format(options.shown(name)))
    end
    options.fail(("a tensor has no method and no field %s%s"):format(
      name, other and "; it is written " .. other or hint(name, names)))
  end

  --- Entry i of dim `at`, counted from 0. key: what stood between the brackets.
  local function entry(t, i, at, key)
    local n = at < t.ndim and tonumber(t.sizes[at]) or 0
    local from = i < 0 and i + n or i
    if from < 0 or from >= n or from % 1 ~= 0 then
      options.fail(("t[%s]: entry %s of dim %d, expected %d ... %d"):format(
        type(key) == "string" and ("%q"):format(key) or tostring(key), tostring(i), at,
        -n, n - 1))
    end
    return tonumber(from)
  end

  --- A bound of a slice, counted from 0.
  local function bound(text, default, least, t, at, key)
    if text == "" then return default end
    local i, n = tonumber(text), tonumber(t.sizes[at])
    local from = i < 0 and i + n or i
    if from < least or from > n then
      options.fail(("t[%q]: bound %s of dim %d, expected %d ... %d"):format(key, text, at,
        least, n))
    end
    return from
  end

  --- The part of a tensor that a text names, and whether it is a view.
  local function part_of(t, text)
    local at, is_view, dims = 0, true, t.ndim
    local _, commas = text:gsub(",", "")
    if commas + 1 > dims then
      options.fail(("t[%q]: %d dims are given, the tensor has %d"):format(text,
        commas + 1, dims))
    end
    for word in (text .. ","):gmatch "%s*(.-)%s*," do
      local from, to = word:match "^(%-?%d*)%s*:%s*(%-?%d*)$"
      if word:find "^%-?%d+$" then
        local i = entry(t, tonumber(word), at, text)
        if at == 0 then
          t = methods.index(t, i)
        else
          local left = t:dims()
          table.remove(left, at + 1)
          t, is_view = methods.reshape(methods.narrow(t, i, 1, at), left), false
        end
      elseif from and from ~= "-" and to ~= "-" then
        local first = bound(from, 0, 0, t, at, text)
        local last = bound(to, tonumber(t.sizes[at]), first, t, at, text)
        if word ~= ":" then
          t, is_view = methods.narrow(t, first, last - first, at), is_view and at == 0
        end
        at = at + 1
      else
        options.fail(("t[%q]: %q is no entry and no slice, expected i, a:b or :"):format(
          text, word))
      end
    end
    return t, is_view
  end

  local function is_entry(key)
    return type(key) == "number" or type(key) == "cdata" and ffi.istype(int64_t, key)
  end

  local function is_part(key)
    return type(key) == "string" and key:find "^[%d%s:,%-]+$" ~= nil
  end

  --- What t[key] returns if no method has this name.
  function tensor.entry_of(t, key)
    if key == "shape" then return sizes.of(t) end
    if is_entry(key) then return methods.index(t, entry(t, key, 0, key)) end
    if is_part(key) then return (part_of(t, key)) end
    return refuse(key)
  end

  --- What t[key] = value does.
  function tensor.set_entry(t, key, value)
    local part, is_view
    if is_entry(key) then part, is_view = methods.index(t, entry(t, key, 0, key)), true
    elseif is_part(key) then part, is_view = part_of(t, key)
    elseif key == "shape" then
      options.fail "a tensor's shape is read-only; t:reshape gives it another one"
    else
      return refuse(key)
    end
    if not is_view then
      options.fail(("t[%q] = ...: this part is a copy, not a view"):format(key))
    end
    if type(value) == "number" then return methods.fill_(part, value) end
    methods.copy_(part, value)
  end
end
