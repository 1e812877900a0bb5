--- Attention with a bias, a mask and a log_weight by the book: one query row after the
-- other, in doubles, over lists of numbers. What is emitted is evaluated from the
-- weights. It shares nothing with kvlab's kernels but spec/reference/expression.lua.
local reference = require "spec.reference.expression"

local M = {}

local function zeros(n)
  local list = {}
  for i = 1, n do list[i] = 0 end
  return list
end

--- What the expressions read of a key, but for its block and its logit.
local function key_environment(o, row)
  local env = {
    block_size = o.block_size, query_position = row.position, query_index = row.position,
    length = row.length, layer = o.layer, blocks = math.ceil(row.length / o.block_size),
    kv_head = row.kv_head, param = o.param,
    const = function(name, at) return o.const(name, at, row) end,
  }
  function env.input(name) return o.input(name, row.seq, row.kv_head, env.block) end
  return env
end

--- The scores of the keys that a row sees, by position.
local function scores_of(o, row)
  local scores, env, logit = {}, key_environment(o, row), nil
  function env.logit() return logit end
  local at = { head = row.head }
  for position = 0, math.min(row.position, row.length - 1) do
    local block = math.floor(position / o.block_size)
    local in_window = o.window == 0 or position > row.position - o.window
    if in_window and (not row.selected or row.selected[block]) then
      local dot = 0
      for x = 0, o.dim - 1 do dot = dot + row.q(x) * o.k(row, position, x) end
      logit = dot * o.scale
      if (o.soft_cap or 0) > 0 then
        local x = math.exp(-2 * math.abs(logit) / o.soft_cap)
        local size = o.soft_cap * (1 - x) / (1 + x)
        logit = logit < 0 and -size or size
      end
      if o.alibi then
        logit = logit
          + o.alibi[row.kv_head * o.group + row.head + 1] * (position - row.position)
      end
      env.block, at.token = block, position % o.block_size
      local score = logit
      for _, name in ipairs { "bias", "log_weight" } do
        local x = o.expressions[name]
        if x then score = score + tonumber(reference.eval(x, at, env)) end
      end
      local mask = o.expressions.mask
      if mask and not reference.eval(mask, at, env) then score = -math.huge end
      scores[position] = score
    end
  end
  return scores
end

--- Attends from one row. row: seq, kv_head, head (of the group), position, length, q(x),
-- selected: a set of blocks, or nil.
---@return number[] out
---@return number lse
---@return table<integer, number> weights  by position
function M.row(o, row)
  local scores, top, sum = scores_of(o, row), -math.huge, 0
  for _, score in pairs(scores) do top = math.max(top, score) end
  local value_dim = o.value_dim or o.dim
  local weights, out = {}, zeros(value_dim)
  if top == -math.huge then return out, top, weights end
  for position, score in pairs(scores) do
    weights[position] = math.exp(score - top)
    sum = sum + weights[position]
  end
  for position, weight in pairs(weights) do
    weights[position] = weight / sum
    for x = 0, scores[position] > -math.huge and value_dim - 1 or -1 do -- V may be NaN
      out[x + 1] = out[x + 1] + weight / sum * o.v(row, position, x)
    end
  end
  return out, top + math.log(sum), weights
end

--- What an emit makes of a block that the row's query may see, as in a decode step of
-- this query, or of token `token` of that block. weights: of each head of the group.
function M.emit(o, row, x, weights, block, token)
  local env = key_environment(o, row)
  env.block = block
  function env.logit() return 0 end
  env.tokens = math.min(o.block_size, row.position + 1 - block * o.block_size)
  env.sizes = { head = o.group, token = o.block_size, dim = o.dim }
  env.weight = function(head, at)
    return weights[head][block * o.block_size + at] or 0
  end
  return tonumber(reference.eval(x, { token = token }, env))
end

return M
