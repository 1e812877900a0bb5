--- Prompts for the recall model, drawn as tools/train_recall.py drew them in training: a
-- context of Zipf-like filler with needles `KEY k1 k2 VAL v1 v2 END`, and queries
-- `Q k1 k2 A` whose answers are v1 v2. README.md in this folder defines every draw. The
-- same seed gives the same prompt everywhere.
local json = require "kvlab.json"
local kv = require "kvlab"
local sources = require "kvlab.sources"
local uniform = require "kvlab.tensor.uniform"

local M = {}

local NEEDLE = 7 -- tokens of a needle
-- Tokens of filler after the last needle. Every policy with `recent` selects the newest
-- blocks, so a needle there says nothing about its scores. Besides, the model was trained
-- on queries that mostly follow other queries, and misses some needles that end right
-- before the question.
local TAIL = 32

local function read_tokens()
  return json.decode(assert(sources.read(kv.paths.root
    .. "/lua/models/recall/tokens.json")))
end

local ids

--- The token ids and constants of tokens.json.
function M.ids()
  ids = ids or read_tokens()
  return ids
end

--- draw(n): a whole number in 0 ... n - 1; draw(): a uniform number in [0, 1).
local function generator(seed)
  local draw = uniform.generator(seed)
  return function(n) return n and math.floor(draw() * n) or draw() end
end

local function shuffled(list, draw)
  for i = #list, 2, -1 do
    local j = 1 + draw(i)
    list[i], list[j] = list[j], list[i]
  end
  return list
end

--- Filler: each token a Zipf-like step after the one before it.
local function lay_filler(tokens, context, draw)
  local n = ids.filler_count
  local x = draw(n)
  tokens[1] = ids.bos
  for i = 2, context do
    x = (x + math.floor((n + 1) ^ draw())) % n
    tokens[i] = ids.filler_first + x
  end
end

--- A function that draws whole numbers from 0 ... n - 1, each at most once.
local function drawn_once(n, draw)
  local used = {}
  return function()
    local x
    repeat x = draw(n) until not used[x]
    used[x] = true
    return x
  end
end

--- Needles {k1, k2, v1, v2}. No two needles have both keys in common, and no two have the
-- same first value: a model that has said v1 finds v2 by the tokens around v1, so two
-- needles that share k2 and v1 would be ambiguous.
local function draw_needles(count, draw)
  local needles, keys = {}, ids.key_count
  local draw_pair = drawn_once(keys * keys, draw)
  local draw_value = drawn_once(ids.value_count, draw)
  for i = 1, count do
    local pair = draw_pair()
    needles[i] = {
      ids.key_first + math.floor(pair / keys), ids.key_first + pair % keys,
      ids.value_first + draw_value(), ids.value_first + draw(ids.value_count),
    }
  end
  return needles
end

--- Links needles to chains of `hops`, in random order: the values of a needle, as
-- numbers, are the keys of the next one in its chain. Returns the needles chain after
-- chain.
local function link(list, hops, draw)
  local order, used, keys = {}, {}, ids.key_count
  for i = 1, #list do order[i] = i end
  shuffled(order, draw)
  local function mark(needle) -- true if another needle has these keys
    local pair = needle[1] * keys + needle[2]
    local was = used[pair]
    used[pair] = true
    return was
  end
  for i, at in ipairs(order) do
    if (i - 1) % hops > 0 then
      list[at][1], list[at][2] = M.key_of(unpack(list[order[i - 1]], 3, 4))
      mark(list[at])
    end
  end
  for i = 1, #order, hops do
    while mark(list[order[i]]) do list[order[i]][2] = ids.key_first + draw(keys) end
  end
  return order
end

--- The key, two tokens, whose numbers are those of a value.
function M.key_of(v1, v2)
  local function key(v) return ids.key_first + (v - ids.value_first) % ids.key_count end
  return key(v1), key(v2)
end

--- Raises unless so many needles fit into a context.
---@param context integer  tokens
---@param needles integer
---@return integer room  for filler between the needles
function M.check(context, needles)
  ids = M.ids()
  if needles > ids.value_count then
    error(("%d needles, expected at most %d"):format(needles, ids.value_count), 3)
  end
  local room = context - 1 - NEEDLE * needles - TAIL
  if room < 0 then
    error(("context is %d tokens, expected at least %d, for %d needles of %d tokens and "
      .. "%d of filler"):format(context, context - room, needles, NEEDLE, TAIL), 3)
  end
  return room
end

--- A prompt: `tokens` (the context) and `queries`, each { ask = {Q, k1, k2, A},
-- answer = {v1, v2}, needle = which needle of the context, from 1 }.
---@param context integer  tokens of the context
---@param needles integer  needles laid into it
---@param queries integer  how many are asked
---@param seed integer
---@param is_even? boolean  put one needle anywhere in each of as many equal parts
---@param hops? integer     link needles to chains of so many; the queries go through one
--                          chain after the other
function M.draw(context, needles, queries, seed, is_even, hops)
  local room = M.check(context, needles)
  local draw, tokens, places = generator(seed), {}, {}
  lay_filler(tokens, context, draw)
  local list = draw_needles(needles, draw)
  for i = 1, needles do
    places[i] = is_even and math.floor((i - 1 + draw()) * (room + 1) / needles)
      or draw(room + 1)
  end
  table.sort(places)
  local order = hops and link(list, hops, draw)
  for i, needle in ipairs(list) do
    local at = 1 + places[i] + NEEDLE * (i - 1) -- token index from 0
    local phrase = { ids.key, needle[1], needle[2], ids.val, needle[3], needle[4],
                     ids["end"] }
    for j = 1, NEEDLE do tokens[at + j] = phrase[j] end
  end
  local asked = {}
  for i, needle in ipairs(list) do
    asked[i] = { ask = { ids.query, needle[1], needle[2], ids.answer },
                 answer = { needle[3], needle[4] }, needle = i }
  end
  if not order then shuffled(asked, draw) end
  local chosen = {}
  for i = 1, queries do
    local at = (i - 1) % needles + 1
    chosen[i] = asked[order and order[at] or at]
  end
  return { tokens = tokens, queries = chosen }
end

return M
