--- Perplexity: how well the model predicts a text.
-- Reads   windows of `length` tokens of a text, which the seed chooses; no two overlap.
--         All but the last `decode` tokens are the prompt
-- Asks    nothing: the last tokens are decoded one by one as the text has them, so that a
--         decode policy selects for each of them
-- Score   the share of these tokens that are the model's likeliest ones; perplexity is
--         exp of the mean of -log p, measured by lua/models/reading.lua
local kv = require "kvlab"

return kv.task.define {
  name = "perplexity", defaults = { decode = 64 }, takes = { decode = kv.task.count },
  open = function(self)
    if not self.text then
      error("task perplexity: text is missing, expected the path of a text file, or kjv",
        0)
    elseif self.length < self.decode + 2 then
      error(("task perplexity: length is %d, expected decode + 2 or more, %d"):format(
        self.length, self.decode + 2), 0)
    end
  end,

  examples = function(self, tokenizer, n, seed)
    local text = kv.task.read_text(self.text)
    local all = tokenizer:encode(text, { bos = false, eos = false })
    local first = tokenizer:encode("", { eos = false }) -- what begins a text, or nothing
    local window = self.length - #first
    local count, list = math.floor(#all / window), {}
    if count < n then
      error(("task perplexity: the text %s has %d tokens, expected at least %d for %d "
        .. "windows of %d"):format(self.text, #all, n * window, n, self.length), 0)
    end
    for i, number in ipairs(kv.task.choose(n, count, seed)) do
      local ids, target = { unpack(first) }, {}
      for at = (number - 1) * window + 1, number * window do
        local to = #ids < self.length - self.decode and ids or target
        to[#to + 1] = all[at]
      end
      list[i] = { ids = ids, read = #ids - 1, target = target }
    end
    return list
  end,
}
