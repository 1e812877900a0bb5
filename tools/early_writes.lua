--- Checks the CUDA kernels that start before the kernels ahead have ended: none of them
-- writes memory before it has waited, and each of them waits (spec/ptx.lua).
--
--   ./kvlab build --cuda=on --cuda-arch=90a && ./kvlab run tools/early_writes.lua
--
-- It reads the PTX that tools/nvcc_checked.sh leaves beside the objects, and fails if
-- that of a source is missing.
local kv = require "kvlab"
local files = require "kvlab.files"

local root = kv.paths.root
package.path = root .. "/?.lua;" .. package.path
local ptx = require "spec.ptx"

local OBJECTS = root .. "/build/obj/release/kvlab_cuda/"

--- The object that each small source is in: that of a unit (premake5.lua).
local unit_of = {}
for _, unit in ipairs(files.find(root .. "/build/units", ".cu")) do
  for source in files.read(unit):gmatch '"%.%./%.%./([^"]+)"' do
    unit_of[root .. "/" .. source] = unit
  end
end

--- The PTX of an object for a GPU that starts kernels early.
local function ptx_of(source)
  local name = OBJECTS .. source:match "([^/]+)%.cu$"
  for _, suffix in ipairs { ".ptx", ".compute_90a.ptx", ".compute_90.ptx" } do
    local text = files.read(name .. suffix)
    if text and text:find("\n.target sm_9", 1, true) then return text end
  end
end

local count, waiting, wrong, never, seen = 0, 0, {}, {}, {}
for _, source in ipairs(files.find(root .. "/kernels/cuda", ".cu")) do
  local object = unit_of[source] or source
  local text = ptx_of(object)
  local kernels = text and not seen[object] and ptx.kernels(text) or {}
  seen[object] = true
  if not text then
    wrong[#wrong + 1] = source .. " has no PTX for sm_90: build --cuda=on --cuda-arch=90a"
  end
  for _, kernel in ipairs(kernels) do
    count, waiting = count + 1, waiting + (kernel.waits and 1 or 0)
    if not kernel.waits then never[ptx.source_name(kernel.name)] = true end
    if kernel.waits and kernel.writes[1] then
      wrong[#wrong + 1] = ("%s of %s writes before it waits, in %d places: %s"):format(
        kernel.name, object, #kernel.writes, (kernel.writes[1]:gsub("%s+", " ")))
    end
  end
end
for _, source in ipairs(files.find(root .. "/kernels/cuda", ".cu*")) do
  for name in pairs(ptx.launched_early(assert(files.read(source)), never)) do
    wrong[#wrong + 1] = ("%s of %s is launched to start early and never waits")
      :format(name, source)
  end
end
for _, words in ipairs(wrong) do io.stderr:write(words, "\n") end
print(("%d kernels, %d of them wait for those ahead, %d errors"):format(count, waiting,
  #wrong))
if #wrong > 0 then os.exit(1) end
