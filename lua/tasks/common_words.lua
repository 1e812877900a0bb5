--- Common words: which words of a list are there most often?
-- Source  Hsieh et al. 2024 (RULER), arXiv:2404.06654: common words extraction; the words
--         of the list and the question are this project's own
-- Shows   a numbered list in random order: `common` words `often` times each, and as many
--         others as fit, `seldom` times each
-- Score   the share of the common words that are in the answer
local kv = require "kvlab"

return kv.task.define {
  name = "common_words", metric = "all",
  defaults = { common = 10, often = 30, seldom = 3 },
  takes = { common = kv.task.count, often = kv.task.count, seldom = kv.task.count },

  build = function(self, writer, size)
    local list, answers = {}, {}
    for i = 1, self.common + size do
      local word = writer:word(i)
      if i <= self.common then answers[i] = word end
      for _ = 1, i <= self.common and self.often or self.seldom do
        list[#list + 1] = word
      end
    end
    for i, word in ipairs(writer:shuffled(list)) do list[i] = i .. ". " .. word end
    return {
      context = "In this list, some words occur more often than others. Remember "
        .. "those.\n\n" .. table.concat(list, " "),
      question = ("\n\nQuestion: What are the %d most common words in the list?\nAnswer:")
        :format(self.common),
      lead = (" The %d most common words are:"):format(self.common), answers = answers,
    }
  end,
}
