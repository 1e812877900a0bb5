--- How many pages of a cache a request may take in its life: what admission reserves. It
-- is known before the request starts, also where a policy evicts tokens.
--
-- Under such a policy, all of a prompt is held until its end, and then also the fresh
-- pages that its eviction copies the best tokens to. Afterwards the old pages are free,
-- and the sequence never holds more than its caps (plus its decoded tokens, if the policy
-- keeps all of these). Only the device knows how a split divides a budget among heads by
-- their scores, so its layers count with the most that it can give.
local C = require("kvlab.library").C

local M = {}

---@class kvlab.serve.Pages
---@field prompt integer  most pages until the prompt has been read and evicted from
---@field after integer   most pages afterwards
---@field widest integer  most blocks of one table, at any time

--- The same for a layer in which a split divides the caps among heads: at most `total`
-- tokens, plus the least of each head.
---@param total integer   tokens that the heads may hold undivided
---@param all integer     that one head holds
---@param grown integer   tokens that follow in each head
local function divided(evictor, total, all, grown)
  local p, size, heads = evictor.policy, evictor.cache.block_size, evictor.heads
  local least = math.max(p.min_blocks, p.sink + p.recent) * size + 1
  local function pages(more)
    return math.min(heads * math.ceil((all + more) / size),
      math.floor((total + heads * (least + more + size - 1)) / size))
  end
  return pages(0), pages(grown), math.ceil((math.min(all, total + least) + grown) / size)
end

--- Adds the pages of a layer under a policy that evicts: first the pages of the prompt
-- and of the copied tokens, then the pages that are held afterwards.
local function add_layer(pages, evictor, layer, seq, n, more, length)
  local size, total, most, is_over = evictor.cache.block_size, 0, 0, false
  local grown = evictor.keeps_decoded and more or 0
  local read, fresh, after, widest = 0, 0, 0, 0
  for head = 0, evictor.heads - 1 do
    local held = seq and C.kvl_sequence_held(seq.handle, layer * evictor.heads + head)
      or 0
    local all, cap = held + n, evictor:cap(layer, head, length)
    local kept = n > 0 and math.min(all, cap) or all
    local last = kept + grown
    if not evictor.keeps_decoded then
      last = math.max(kept, math.min(kept + more, cap))
    end
    if kept < all then fresh, is_over = fresh + math.ceil(kept / size), true end
    total, most = total + math.min(all, cap), math.max(most, all)
    read, after = read + math.ceil(all / size), after + math.ceil(last / size)
    widest = math.max(widest, math.ceil(all / size), math.ceil(last / size))
  end
  if is_over and evictor:is_divided() then
    local wide
    fresh, after, wide = divided(evictor, total, most, grown)
    widest = math.max(widest, wide)
  end
  pages.prompt, pages.after = pages.prompt + read + fresh, pages.after + after
  pages.widest = math.max(pages.widest, widest)
end

--- The pages that a request takes whose sequence reads a prompt of n tokens and then
-- decodes `more`.
---@param cache kvlab.Cache
---@param attention kvlab.Attention|nil  whose policies serve it; nil without a model
---@param seq kvlab.Sequence|nil  what the request goes on from; nil: an empty one
---@param n integer       tokens of the prompt, 0 for none
---@param more integer    tokens that are decoded after it and go into the cache
---@param length? integer of the text when its last prompt ended (seq's and n)
---@return kvlab.serve.Pages
function M.needed(cache, attention, seq, n, more, length)
  local evictor, before = attention and attention.evictor, seq and seq:length() or 0
  if not evictor then
    local blocks = math.ceil((before + n + more) / cache.block_size)
    local pages = blocks * cache.cut_layers * cache.cut_heads
    return { prompt = pages, after = pages, widest = blocks }
  end
  local pages = { prompt = 0, after = 0, widest = 0 }
  for layer = 0, evictor.layers - 1 do
    add_layer(pages, evictor, layer, seq, n, more, length or before + n)
  end
  pages.prompt = math.max(pages.prompt, pages.after)
  return pages
end

--- How many tokens may be decoded after a prompt, at most `most`; -1 if the prompt itself
-- does not fit.
---@param engine table
---@param attention kvlab.Attention
---@param seq kvlab.Sequence|nil
---@param n integer
---@param most integer
---@return integer
function M.room(engine, attention, seq, n, most)
  local cache = engine.cache
  local blocks = math.min(engine.max_blocks or cache.blocks, cache.blocks)
  local function fits(more)
    local pages = M.needed(cache, attention, seq, n, more)
    return pages.prompt <= cache.pages and pages.widest <= blocks
  end
  if most < 0 or not fits(0) then return -1 end
  local low, high = 0, most -- low fits
  while low < high do
    local middle = math.ceil((low + high) / 2)
    if fits(middle) then low = middle else high = middle - 1 end
  end
  return low
end

return M
