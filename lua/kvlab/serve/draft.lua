--- Speculative decoding with drafts from the text itself (prompt lookup): the last few
-- tokens are searched in the text so far, and the tokens that followed them there are the
-- draft of what comes next. One decode step computes the newest token and the whole draft
-- (engine:verify). The draft is accepted up to its first token that is not the likeliest
-- one, and the rest is taken back. So a step gives one token or more, and they are those
-- that greedy decoding gives.
--
-- Source  Leviathan et al. 2023, arXiv:2211.17192 (verification); Saxena 2023, prompt
--         lookup decoding; Yang et al. 2023, arXiv:2304.04487 (drafts copied from the
--         text)
local options = require "kvlab.options"

local M = {}

--- The kind of the option `draft`: ngram: how many of the last tokens are searched (3);
-- tokens: the most tokens of a draft (8).
M.KIND = options.nested { ngram = options.within(1, 64), tokens = options.within(1, 127) }

---@class kvlab.serve.Draft  of a request
---@field ngram integer
---@field tokens integer
---@field steps integer     decode steps of the request so far
---@field proposed integer  tokens of drafts
---@field accepted integer  those of them that were right
---@field ids integer[]     the draft of the present step

--- The state that a request needs for drafts, made from the option; nil if it makes no
-- drafts.
---@return kvlab.serve.Draft|nil
function M.take(o)
  if not o then return nil end
  return { ngram = o.ngram or 3, tokens = o.tokens or 8, steps = 0, proposed = 0,
           accepted = 0, ids = {} }
end

--- Where the last `n` of `count` tokens occurred last before: the index of the token that
-- followed them there, or nil.
local function find(tokens, count, n)
  local last = tokens[count]
  for at = count - 1, n, -1 do
    if tokens[at] == last then
      local same = 1
      while same < n and tokens[at - same] == tokens[count - same] do same = same + 1 end
      if same == n then return at + 1 end
    end
  end
end

--- Makes the draft of a request's next step, in draft.ids, of at most `most` tokens; may
-- be empty. A draft that reaches the end of the text goes on with its own tokens, so that
-- something that repeats itself is drafted on and on.
---@param draft kvlab.serve.Draft
---@param tokens integer[]  the text so far
---@param count integer     how many they are
---@param most integer
---@return integer count    of tokens in draft.ids
function M.propose(draft, tokens, count, most)
  local ids = draft.ids
  for i = #ids, 1, -1 do ids[i] = nil end
  most = math.min(most, draft.tokens)
  local from = most > 0 and count > draft.ngram and find(tokens, count, draft.ngram)
  if not from then return 0 end
  for i = 1, most do
    local at = from + i - 1
    ids[i] = at <= count and tokens[at] or ids[at - count]
  end
  return most
end

--- How many tokens of a draft are accepted: all before the first one that is not the
-- model's likeliest token there. says[first + i]: the likeliest token after the i-th of
-- the draft, says[first]: that after the newest token of the text.
---@param ids integer[]
---@param says integer[]
---@param first integer
function M.accepted(ids, says, first)
  local n = 0
  while n < #ids and ids[n + 1] == says[first + n] do n = n + 1 end
  return n
end

return M
