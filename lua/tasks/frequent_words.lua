--- Frequent words: which made-up words of a text are there most often, when the k-th word
-- is there k^-alpha times as often as the first?
-- Source  Hsieh et al. 2024 (RULER), arXiv:2404.06654: frequent words extraction. As
--         there, the most frequent "word" is a row of dots, which does not count
-- Asks    for the three most frequent words
-- Score   the share of these words that are in the answer
local kv = require "kvlab"

local KINDS, ANSWERS = 50, 3

return kv.task.define {
  name = "frequent_words", metric = "all", defaults = { alpha = 2 },
  least = 100, -- the third and fourth words then differ in how often they are there
  open = function(self)
    if self.alpha <= 1 then
      error(("task frequent_words: alpha is %g, expected more than 1"):format(self.alpha),
        0)
    end
  end,

  build = function(self, writer, size)
    local total, text, answers = 0, {}, {}
    for k = 1, KINDS do total = total + k ^ -self.alpha end
    for k = 1, KINDS do
      local word = k == 1 and "...." or writer:letters(6, "a")
      if k > 1 and k <= ANSWERS + 1 then answers[k - 1] = word end
      for _ = 1, math.floor(size * k ^ -self.alpha / total) do text[#text + 1] = word end
    end
    return {
      context = "Count how often each coded word occurs in this text.\n\n"
        .. table.concat(writer:shuffled(text), " "),
      question = "\n\nQuestion: Without the dots \"....\", what are the three most "
        .. "frequent words in the coded text?\nAnswer:",
      lead = " The three most frequent words are:", answers = answers,
    }
  end,
}
