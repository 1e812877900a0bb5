--- What a policy costs in KV memory: three metrics of a row that kv.probe counts, each a
-- share of what dense attention reads or holds in the same steps.
--
--   bytes_share  bytes that a step reads
--   held_share   tokens that the sequences hold
--   moved_share  bytes that a step moves over the link or copies
--
-- Three more are counted by the cache (Cache:stats) while all questions are asked,
-- including the prompts that the policy reads by itself: bytes_peak, bytes_evicted and
-- bytes_moved.
--
-- A description of a table or picture names one of these costs as its x, value, beside or
-- over. `--over=held_share` puts another cost in its place.
local reads = require "kvlab.policy.reads"

local M = {}

M.NAMES = { "bytes_share", "held_share", "moved_share" }

local WORDS = { bytes_share = "bytes read", held_share = "bytes held",
                moved_share = "bytes moved" }

local COUNTED = { "bytes_peak", "bytes_evicted", "bytes_moved" }

--- Adds these metrics to those of a row.
---@param metrics table
---@param seen table    what a probe's metrics returns
---@param stats? table  what the cache's stats returns; without it, there are only shares
---@return table metrics
function M.add(metrics, seen, stats)
  for _, name in ipairs(M.NAMES) do metrics[name] = seen[name] end
  for _, name in ipairs(stats and COUNTED or {}) do metrics[name] = stats[name] end
  return metrics
end

--- Begins to count what the decode steps of an attention read, hold and move, including
-- steps of drafts, without the comparisons of kv.probe. While it counts, steps are not
-- replayed from graphs.
---@param attention kvlab.Attention
---@return kvlab.Reads counted
---@return fun() stop
function M.count(attention)
  local counted = reads.new(attention.shape, attention.cache)
  counted.has_drafts = true
  attention.reads, attention.probe = counted, { observe = function() end }
  return counted, function() attention.reads, attention.probe = nil, nil end
end

--- The costs of answers, each a share of what dense attention reads or holds for the same
-- tokens.
---@param counted kvlab.Reads  of the decode steps of the answers, and of their drafts
---@param tokens integer       that these steps added to the answers
---@return table metrics
function M.of_answers(counted, tokens)
  local dense = counted.attended_all / counted.observed * tokens
  return { bytes_share = (counted.attended + counted.scored) / dense,
           held_share = counted.held / counted.texts,
           moved_share = counted.moved / dense }
end

--- A cost in words, for titles.
---@param name string
---@return string
function M.words(name) return WORDS[name] end

--- The text along an axis with a cost; nil for any other name.
---@param name string
---@return string|nil
function M.label(name)
  return WORDS[name] and WORDS[name] .. ", as a share of all of K and V"
end

--- A description of a table or picture in which the cost `over` replaces any other cost.
-- An axis with a cost gets the cost's text.
---@param view table
---@param over string|nil  nil: it stays as it is
---@return table
function M.chosen(view, over)
  local chosen = {}
  for key, value in pairs(view) do chosen[key] = value end
  for _, key in ipairs { "x", "value", "beside", "over" } do
    if over and WORDS[view[key]] then chosen[key] = over end
  end
  if chosen.x ~= view.x or not view.xlabel then chosen.xlabel = M.label(chosen.x) end
  return chosen
end

--- Raises unless --over names a cost that rows with these metrics have.
---@param over string
---@param name string       of the experiment
---@param metrics string[]
function M.check(over, name, metrics)
  if not WORDS[over] then
    error(("--over is %s, expected %s"):format(over, table.concat(M.NAMES, ", ")), 0)
  end
  for _, metric in ipairs(metrics) do
    if metric == over then return end
  end
  error(("--over is %s, which rows of %s do not have"):format(over, name), 0)
end

return M
