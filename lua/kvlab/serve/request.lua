--- A request: the tokens to read, how many to write, and the state of its life.
--
-- Its fields have the names of UCM GSA's GSAReqStat: request_id, index_in_batch,
-- num_scheduled_tokens, num_computed_tokens, block_hashes, selected_blocks,
-- prefetch_task, prefetch_ready; vllm_block_ids is request:block_ids().
local arguments = require "kvlab.arguments"
local draft = require "kvlab.serve.draft"
local options = require "kvlab.options"
local sampler = require "kvlab.serve.sampler"

local M = {}

---@class kvlab.Request
---@field request_id integer
---@field state string               arriving, waiting, running, finished
---@field tokens integer[]|nil       the prompt, then the output; nil without a model
---@field prompt_length integer
---@field num_tokens integer         tokens of prompt and output together
---@field num_computed_tokens integer tokens whose K and V are in the cache
---@field num_scheduled_tokens integer tokens that the present step computes
---@field index_in_batch integer     in the present step, from 0; -1: not in it
---@field block_hashes any[]         keys of its full blocks
---@field selected_blocks integer[]|nil  logical blocks that build_sparse_meta chose
---@field prefetch_task table|nil    its ticket, while its blocks are on their way
---@field attention kvlab.Attention|nil  whose policies serve it; nil without a model
---@field keeps_output boolean       others may share the blocks of its output
---@field reads_prompt boolean       it computes its whole prompt, and shares nothing
---@field shares_seen boolean        it shares only blocks that its attention has computed
---@field read_length integer        tokens that are read as a prompt, and not decoded
---@field evicts boolean             its policy evicts tokens
---@field claim kvlab.serve.Pages|nil  the pages that it reserves, if it does
---@field holds boolean              it holds its tokens after its end, for continue
---@field continues boolean         it goes on from what another request held
---@field prefetch_ready boolean     nothing is left to fetch; the rest must be computed
---@field max_tokens integer         most tokens of output
---@field arrival_us number
---@field deadline_us number         when the first token is due
---@field admitted_us number|nil
---@field first_token_us number|nil
---@field finish_us number|nil
---@field finish_reason string|nil   length, stop, cancelled, error
---@field error any                  what its sample or on_token raised
---@field choice kvlab.serve.Choice|nil  how its tokens are chosen; nil: the likeliest
---@field logprobs table[]|nil       of each token of output, if it asks for them:
--                                   { logprob =, top = { { id =, logprob = }, … } }
---@field draft kvlab.serve.Draft|nil  how drafts are made; how many were right
---@field next_tokens integer[]|nil  what a step with a draft gave
---@field next_logprobs table[]|nil  of what the step gave; next_from: after how many
--                                   tokens of output
---@field unseen integer             how many of these the server has yet to reveal
---@field prompt_logprobs table<integer, table>|nil  the same of each token of the prompt
--                                   but the first, if it asks for them
---@field top_of_prompt integer|nil  of how many of the likeliest
---@field watches boolean            reads is kept
---@field reads table|nil            which blocks its newest decode step read, see
-- watch.lua
---@field is_computed boolean        a step computed its num_scheduled_tokens, and the
--                                   server has not taken note of it yet
---@field preemptions integer
---@field blocks_asked integer       full blocks of the prompt that could be shared
---@field blocks_shared integer      how many of them were found on the device
---@field blocks_loaded integer      how many of them were brought from the store
local Request = {}
Request.__index = Request

--- The options of serve:submit.
M.KNOWN = {
  tokens = { "a list of at least one token id", function(x)
    return type(x) == "table" and #x > 0
  end },
  input_length = options.count, hash_ids = options.table, hash_block = options.count,
  max_tokens = options.required(options.count),
  stop_tokens = options.list_of(options.whole),
  stop = options.list_of(options.list_of(options.whole)),
  arrival_us = options.number, deadline_us = options.number,
    sample = options.callable, on_token = options.callable, draft = draft.KIND,
  attention = options.like("an attention over the engine's cache", "cache", "forward"),
  keep_output = options.boolean, prompt_logprobs = options.within(0, 1000),
  watch = options.boolean, hold = options.boolean,
}
for name, kind in pairs(sampler.KNOWN) do M.KNOWN[name] = kind end

--- The options of serve:fork; it takes everything else from the parent.
M.KNOWN_OF_FORK = {}
for name, kind in pairs(M.KNOWN) do M.KNOWN_OF_FORK[name] = kind end
M.KNOWN_OF_FORK.tokens = { "a list of token ids", options.table[2] }
for _, name in ipairs { "input_length", "hash_ids", "hash_block", "attention",
                        "keep_output", "prompt_logprobs", "watch" } do
  M.KNOWN_OF_FORK[name] = nil
end

--- Makes a request from the options of serve:submit, and checks them. An error blames
-- `level`.
function M.new(o, request_id, level)
  if o.tokens == nil and o.input_length == nil then
    error("request: tokens (or input_length, without a model) is missing", level + 1)
  end
  local choice, tokens = sampler.take(o), nil
  if choice and o.sample then
    error("request: sample is a function, expected none beside temperature and the other "
      .. "options of sampling", level + 1)
  end
  if o.tokens then
    tokens = {}
    for i, id in ipairs(o.tokens) do tokens[i] = id end
  end
  if o.draft and (o.sample or not tokens) then
    error("request: draft is a table, expected none beside sample, or without a model",
      level + 1)
  end
  local length = tokens and #tokens or o.input_length
  local stops
  if o.stop_tokens then
    stops = {}
    for _, id in ipairs(o.stop_tokens) do stops[id] = true end
  end
  return setmetatable({
    request_id = request_id, state = "arriving", tokens = tokens, prompt_length = length,
    num_tokens = length, num_computed_tokens = 0, num_scheduled_tokens = 0,
    index_in_batch = -1, is_computed = false, blocks_put = 0, read_length = length,
    evicts = false, holds = o.hold or false, continues = false,
    block_hashes = {}, hash_ids = o.hash_ids, selected_blocks = nil,
    prefetch_task = nil, prefetch_ready = false, max_tokens = o.max_tokens,
    stop_tokens = stops, stop = o.stop, sample = o.sample, on_token = o.on_token,
    draft = draft.take(o.draft), unseen = 0,
    choice = choice, logprobs = choice and choice.logprobs and {} or nil,
    attention = o.attention, keeps_output = o.keep_output ~= false,
    prompt_logprobs = o.prompt_logprobs and {} or nil, top_of_prompt = o.prompt_logprobs,
    watches = o.watch or false, reads_prompt = false,
    shares_seen = false,
    arrival_us = o.arrival_us, deadline_us = o.deadline_us, preemptions = 0,
    blocks_asked = 0, blocks_shared = 0, blocks_loaded = 0, store_end = math.huge,
  }, Request)
end

--- The number of tokens generated so far.
function Request:output_length() return self.num_tokens - self.prompt_length end

--- The tokens generated so far.
function Request:output()
  local list = {}
  if not self.tokens then return list end -- without a model there are none
  for i = self.prompt_length + 1, self.num_tokens do list[#list + 1] = self.tokens[i] end
  return list
end

--- The physical blocks, in logical order, of a layer and KV head where the cache has
-- tables by these.
---@param layer? integer
---@param head? integer
function Request:block_ids(layer, head)
  return self.seq and self.seq:table(layer, head) or {}
end

--- Whether its next step decodes: everything is computed except its newest token, which
-- it generated itself.
function Request:is_decoding()
  return self.num_computed_tokens >= self.read_length
    and self.num_computed_tokens == self.num_tokens - 1
end

local function ends_with(tokens, count, phrase, least)
  local n = #phrase
  if n == 0 or count - n < least then return false end
  for i = 1, n do
    if tokens[count - n + i] ~= phrase[i] then return false end
  end
  return true
end

--- Why the request is done after its newest token, or nil: max_tokens, a stop token, or
-- one of the stop phrases (lists of token ids) that lies wholly within the output.
function Request:stop_reason()
  local tokens = self.tokens
  if tokens and self.stop_tokens and self.stop_tokens[tokens[self.num_tokens]] then
    return "stop"
  end
  for _, phrase in ipairs(tokens and self.stop or {}) do
    if ends_with(tokens, self.num_tokens, phrase, self.prompt_length) then
      return "stop"
    end
  end
  if self:output_length() >= self.max_tokens then return "length" end
end

--- The kind of a request.
M.REQUEST = { "a request", function(x)
  return getmetatable(x) == Request
end }
arguments.methods(Request, "a request", {})

return M
