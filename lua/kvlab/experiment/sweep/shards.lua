--- Finds and merges the shards of a sweep: parts of one experiment that run separately.
--
--   DIR/shards/3-of-20/   results.jsonl, manifest.json (with `finished` when complete)
--   DIR/                  results.jsonl of all shards, manifest.json, report.html, plots
--
-- A shard's process writes only to its own folder; merging writes only to DIR.
local files = require "kvlab.files"
local manifests = require "kvlab.experiment.manifest"
local results = require "kvlab.experiment.results"

local M = {}

---@class kvlab.shard
---@field index integer
---@field count integer
---@field folder string
---@field manifest table|nil  nil: the shard was killed before it wrote one

--- Lists the shards that have a folder, in the order of their numbers.
---@param root string
---@return kvlab.shard[]
function M.list(root)
  local list = {}
  for _, name in ipairs(files.list(root .. "/shards")) do
    local index, count = name:match "^(%d+)%-of%-(%d+)$"
    if index then
      local folder = ("%s/shards/%s"):format(root, name)
      list[#list + 1] = { index = tonumber(index), count = tonumber(count),
                          folder = folder, manifest = manifests.read(folder) }
    end
  end
  table.sort(list, function(a, b) return a.index < b.index end)
  return list
end

--- Raises if the folder belongs to a sweep with another number of shards, because the
-- shards would then overlap.
---@param root string
---@param count integer
function M.check_count(root, count)
  for _, shard in ipairs(M.list(root)) do
    if shard.count ~= count then
      error(("%s is a sweep in %d shards, not %d: choose another --out=DIR, or remove %s"
        .. "/shards (after `kvlab sweep merge %s SCRIPT`, which keeps its rows)"):format(
        root, shard.count, count, root, root), 0)
    end
  end
end

--- Returns the shards of a folder and the manifest of one of them; raises if none of them
-- has a manifest.
---@param root string
---@return kvlab.shard[] shards, table manifest
function M.open(root)
  local list = M.list(root)
  for _, shard in ipairs(list) do
    if shard.manifest then return list, shard.manifest end
  end
  error(("%s has no shards that have begun: start one with kvlab run SCRIPT --shard=i/n"
    .. " --out=%s, or all with kvlab sweep submit"):format(root, root), 0)
end

-- The fields of a shard's manifest that the merged manifest keeps.
local KEPT = { "shard", "date", "finished", "commit", "dirty", "command", "description" }

--- Takes the rows of all shards over into the results of the sweep. Raises if the rows
-- were made by different versions of a source, unless keeps_stale is set.
---@param root string
---@param store kvlab.results  the results of the sweep
---@param described table      the merged manifest; gets `shards`, and a description of
---  every machine
---@param keeps_stale boolean
---@return integer             # how many rows are new or different
function M.adopt(root, store, described, keeps_stale)
  local rows, lines, made, machines, seen, again = {}, {}, {}, {}, {}, 0
  for _, shard in ipairs(M.list(root)) do
    local manifest = shard.manifest
    if manifest then
      manifests.check(shard.folder, described, true)
      local kept, machine = {}, manifest.description
      for _, key in ipairs(KEPT) do kept[key] = manifest[key] end
      made[#made + 1] = kept
      if machine and not machines[machine] then
        machines[#machines + 1], machines[machine] = machine, true
      end
      local its_rows, its_lines, repeated = results.read(shard.folder)
      again = again + repeated
      for i, row in ipairs(its_rows) do
        local key = results.key(row.config)
        again, seen[key] = again + (seen[key] and 1 or 0), true
        rows[#rows + 1], lines[#lines + 1] = row, its_lines[i]
      end
    end
  end
  if again > 0 then
    io.stderr:write(("%d rows are there twice, as after a grid grew; those of the last"
      .. " shard count\n"):format(again))
  end
  local mixed = results.mixed(rows)
  if mixed[1] and not keeps_stale then
    error(("the shards of %s were made by different versions of %s: run the older ones"
      .. " again, or merge them with --set stale=keep"):format(root,
      table.concat(mixed, ", ")), 0)
  end
  described.shards, described.description = made, table.concat(machines, "; ")
  if #machines > 1 then
    io.stderr:write("shards ran on different machines; their times cannot be compared: ",
      described.description, "\n")
  end
  return store:adopt(rows, lines)
end

--- Raises with the number of rows that are missing and the shards that should have them.
---@param plan kvlab.plan
---@param missing table[]
function M.explain_missing(plan, missing)
  local unfinished = {}
  local list = M.list(plan.root)
  local has_begun = {}
  for _, shard in ipairs(list) do has_begun[shard.index] = shard end
  for i = 1, list[1].count do
    local manifest = has_begun[i] and has_begun[i].manifest
    if not (manifest and manifest.finished) then unfinished[#unfinished + 1] = i end
  end
  error(("%d of %d rows are missing; %s"):format(#missing, #plan.configs,
    #unfinished > 0 and ("unfinished shards of %d: %s"):format(list[1].count,
      table.concat(unfinished, ", ")) or "all shards are complete, for another grid"), 0)
end

return M
