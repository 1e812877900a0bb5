--- What an attention tells its policies outside of steps: which sequences begin and end,
-- and the content of blocks that no step of theirs wrote. attention.lua adds these
-- functions to its own.
local arguments = require "kvlab.arguments"
local objects = require "kvlab.memory.objects"
local options = require "kvlab.options"
local tensor = require "kvlab.tensor.tensor"

local M = {}

local Attention = {}

--- Calls fn(policy) for every policy of an attention, once for one of several phases.
function M.each_policy(self, fn)
  fn(self.prefill_policy)
  if self.decode_policy ~= self.prefill_policy then fn(self.decode_policy) end
  if self.draft_policy then fn(self.draft_policy) end
end
local each_policy = M.each_policy

local function call_for_heads(self, hook, seq)
  each_policy(self, function(p)
    for _, one in ipairs(p[hook] and (self.cache.cut_heads > 1 and seq:heads() or { seq })
      or {}) do p[hook](p, one) end
  end)
end

--- Tells the policies that the server begins to serve a sequence.
function Attention:request_begin(seq) call_for_heads(self, "request_begin", seq) end

--- Tells the policies that a sequence ends; they forget what they keep for it.
function Attention:request_finished(seq) call_for_heads(self, "request_finished", seq) end

--- Shows a policy the K of blocks, in layers first ... last.
local function show_to(self, p, blocks, tokens, first, last)
  local dev = self.cache.device
  local ids = tensor.from(dev, "i32", { #blocks }, blocks)
  local ev = { blocks = ids, k_blocks = ids, turns = #blocks,
               num_tokens = tensor.from(dev, "i32", { #blocks }, tokens) }
  for layer = first, last do
    ev.layer, ev.k = layer, self.cache:layer(layer)
    p:on_prefill_offload(ev)
  end
end

--- Shows a policy blocks, but those of whose content it has kept what it needs.
local function show_unless_recalled(self, p, blocks, tokens, keys)
  if not p.on_prefill_offload then return end
  local new, new_tokens = {}, {}
  for i, block in ipairs(blocks) do
    if not (keys and p.recall_block and p:recall_block(keys[i], block)) then
      new[#new + 1], new_tokens[#new_tokens + 1] = block, tokens[i]
    end
  end
  if #new > 0 then
    tensor.scope(show_to, self, p, new, new_tokens, 0, self.cache.layers - 1)
  end
end

--- Shows the policies blocks of one layer.
---@param layer integer
---@param blocks integer[]  physical
---@param tokens integer[]  how many are valid in each block
function Attention:show_layer(layer, blocks, tokens)
  if #tokens ~= #blocks then
    options.fail(("show_layer: tokens has %d numbers, expected %d, one for each block")
      :format(#tokens, #blocks))
  end
  self.cache:layer(layer)
  each_policy(self, function(p)
    if p.on_prefill_offload then
      tensor.scope(show_to, self, p, blocks, tokens, layer, layer)
    end
  end)
end

--- Shows the policies blocks that none of their steps wrote, as if they had been
-- prefilled now. Until then the policies' summaries of these blocks describe the former
-- content of their memory.
---@param blocks integer[]  physical
---@param tokens integer[]  how many are valid in each block
---@param keys? any[]       of their content, for policies that kept what they know of it
function Attention:show(blocks, tokens, keys)
  if #tokens ~= #blocks then
    options.fail(("show: tokens has %d numbers, expected %d, one for each block"):format(
      #tokens, #blocks))
  end
  each_policy(self, function(p)
    show_unless_recalled(self, p, blocks, tokens, keys)
  end)
end

--- Tells the policies that a full block, whose content has this key, may leave the cache
-- and come back.
---@param store? kvlab.Store  where it goes
function Attention:keep(key, block, store)
  each_policy(self, function(p)
    if p.keep_block then p:keep_block(key, block, store) end
  end)
end

--- Calls fn(policy) for every policy that needs more of a block than its K and V.
local function each_watching(self, fn)
  each_policy(self, function(p)
    if p.watches_prompt == "blocks" then fn(p) end
  end)
end

--- How many of the first n blocks, without a gap, the policies can serve once a store has
-- given back their K and V.
---@param store kvlab.Store
---@param keys kvlab.BlockKey[]
---@param n integer
function Attention:find(store, keys, n)
  each_watching(self, function(p)
    n = p.find_blocks and p:find_blocks(store, keys, n) or 0
  end)
  return n
end

--- Gives the policies what a store has of a full block beside its K and V, and shows the
-- block to those that need nothing more. Returns whether all of them can serve it now.
---@return boolean
function Attention:recall(key, block, store)
  local is_whole = true
  each_watching(self, function(p)
    is_whole = is_whole and p.recall_block ~= nil and p:recall_block(key, block, store)
  end)
  if not is_whole then return false end
  each_policy(self, function(p)
    if p.watches_prompt ~= "blocks" then
      show_unless_recalled(self, p, { block }, { self.cache.block_size }, { key })
    end
  end)
  return true
end

--- Whether a policy needs the queries of prompts, so that all of a prompt is computed;
-- "blocks": all of it but blocks that a step of this attention has computed.
---@return boolean|string
function Attention:watches_prompts()
  local watches = false
  each_policy(self, function(p)
    local own = p.watches_prompt or false
    if own == true or not watches then watches = own end
  end)
  return watches
end

--- Shows policies that were attached late the sequences that are already in the cache.
---@param seqs kvlab.Sequence[]
function Attention:adopt(seqs)
  each_policy(self, function(p)
    if p.watches_prompt then
      error(("policy %s watches the prompt's queries, which are gone: prefill anew")
        :format(p.name), 4)
    end
  end)
  local cache = self.cache
  for i = 1, self.evictor and #seqs or 0 do
    if seqs[i]:length() > 0 then
      error(("policy %s evicts tokens, and has to see them from the first one on: "
        .. "prefill anew"):format(self.decode_policy.name), 4)
    end
  end
  local size, layers = cache.block_size, cache.layers / cache.cut_layers
  for _, seq in ipairs(seqs) do self:request_begin(seq) end
  for cut = 0, cache.cut_layers - 1 do -- the layers that have tables in common
    local ids, tokens = {}, {}
    for i = 0, #seqs * cache.cut_heads - 1 do
      local seq, head = seqs[math.floor(i / cache.cut_heads) + 1], i % cache.cut_heads
      local held = seq:held(cut, head)
      for b, block in ipairs(seq:table(cut, head)) do
        ids[#ids + 1] = block
        tokens[#tokens + 1] = math.min(size, held - (b - 1) * size)
      end
    end
    each_policy(self, function(p)
      if p.on_prefill_offload and #ids > 0 then
        tensor.scope(show_to, self, p, ids, tokens, cut * layers, (cut + 1) * layers - 1)
      end
    end)
  end
end

--- Makes the policies forget everything; the sequences are not changed.
function Attention:reset()
  each_policy(self, function(p)
    if p.reset then p:reset() end
  end)
end

local OF_SEQUENCE = { seq = objects.sequence }
local ARGUMENTS = {
  request_begin = OF_SEQUENCE, request_finished = OF_SEQUENCE,
  show_layer = { layer = options.whole, blocks = objects.blocks,
                 tokens = objects.blocks },
  show = { blocks = objects.blocks, tokens = objects.blocks,
           keys = options.optional(options.table) },
  keep = { key = objects.key, block = options.whole },
  recall = { key = objects.key, block = options.whole },
  adopt = { seqs = objects.sequences },
}

--- Gives the class of attentions the functions of this file.
function M.add(class)
  for name, method in pairs(Attention) do class[name] = method end
  arguments.methods(class, "an attention", ARGUMENTS)
end

return M
