--- What a bench records about the machine that it runs on, as far as programs there can
-- tell.
local kv = require "kvlab"

local M = {}

--- The lines that a shell command prints; none where it fails.
---@param command string
---@param meanwhile? fun()  what to do while it runs
---@return string[]
function M.lines(command, meanwhile)
  local list, pipe = {}, io.popen(command .. " 2>/dev/null")
  if meanwhile then meanwhile() end
  for line in pipe:lines() do list[#list + 1] = line end
  pipe:close()
  return list
end

--- The commit of the source tree or bundle in `root`, with -dirty where the tree differs
-- from it; nil where nobody knows.
function M.commit(root)
  local bundled = io.open(root .. "/commit")
  if bundled then
    local words = bundled:read "*l"
    bundled:close()
    return words
  end
  return M.lines(('git -C "%s" describe --always --dirty --exclude "*"'):format(root))[1]
end

-- What nvidia-smi calls a thing, and what the bench calls it.
local QUERY = {
  { "driver_version", "driver" },
  { "clocks.sm", "sm_mhz" }, { "clocks.max.sm", "sm_mhz_max" },
  { "clocks.mem", "memory_mhz" }, { "clocks.max.mem", "memory_mhz_max" },
  { "power.limit", "power_limit_w" }, { "temperature.gpu", "temperature_c" },
}

-- The version of how limits are measured; 2: R is measured for as many bytes as a case
-- has.
local LIMITS = 2

--- The header's fields. The clocks of a busy device: it reads memory meanwhile.
function M.describe(b)
  local head = { id = "header", device = b.device:name(), description = b.description,
                 date = b.date, commit = b.commit, abi = kv.C.kvl_abi(),
                 limits = LIMITS }
  if b.kind ~= "cuda" then return head end
  local names = {}
  for i, pair in ipairs(QUERY) do names[i] = pair[1] end
  local query = ("nvidia-smi -i %s --format=csv,noheader,nounits --query-gpu=%s"):format(
    b.device:name():match "%d+", table.concat(names, ","))
  local line = M.lines(query, function()
    for _ = 1, 5 do b:settle(function() b:flush() end) end
  end)[1] or ""
  local i = 0
  for field in line:gmatch "[^,]+" do
    i = i + 1
    local value = field:match "^%s*(.-)%s*$"
    if QUERY[i] and not value:find "[%[%]]" then -- [N/A]
      head[QUERY[i][2]] = i > 1 and tonumber(value) or value
    end
  end
  return head
end

--- The header as text.
function M.words(head)
  local lines = { ("device %s: %s"):format(head.device, head.description) }
  if head.sm_mhz then
    lines[2] = ("driver %s, SM %s of %s MHz, memory %s of %s MHz, power limit %s W")
      :format(head.driver, head.sm_mhz, head.sm_mhz_max, head.memory_mhz,
        head.memory_mhz_max, head.power_limit_w)
  end
  lines[#lines + 1] = ("%s, commit %s, ABI %d"):format(head.date,
    head.commit or "unknown", head.abi)
  return table.concat(lines, "\n") .. "\n"
end

return M
