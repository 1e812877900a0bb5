--- A data set of LongBench with its own prompt, length of answers and score, so that the
-- numbers can be compared with published ones. The files are LongBench's and not part of
-- kvlab: file is a JSONL file of its data, prompts its config/dataset2prompt.json and
-- lengths its config/dataset2maxlen.json. Without lengths, answer_tokens gives the length
-- of answers.
-- Source  Bai et al. 2023, arXiv:2308.14508: pred.py and eval.py
-- Asks    the prompt, less the middle of what is too long for `length` with the answer;
--         with `chat` as a message, but for the data sets that LongBench asks without
-- Score   that of the data set, see kv.longbench
-- Fails   Chinese answers in words: LongBench cuts them by the package jieba
local kv = require "kvlab"

local SCORES = { narrativeqa = "f1", qasper = "f1", multifieldqa_en = "f1",
  hotpotqa = "f1", ["2wikimqa"] = "f1", musique = "f1", gov_report = "rouge",
  qmsum = "rouge", multi_news = "rouge", trec = "classes", triviaqa = "f1",
  samsum = "rouge", lsht = "classes", passage_retrieval_en = "retrieval",
  passage_count = "count", passage_retrieval_zh = "retrieval", lcc = "code",
  ["repobench-p"] = "code" }
local IN_WORDS = { multifieldqa_zh = true, dureader = true, vcsum = true }
local FIRST_LINE = { trec = true, triviaqa = true, samsum = true, lsht = true }
local NO_CHAT = { trec = true, triviaqa = true, samsum = true, lsht = true, lcc = true,
                  ["repobench-p"] = true }

local function refuse(...) error("task longbench: " .. string.format(...), 0) end

--- The entry of a data set in one of LongBench's files.
local function entry(self, option, kind)
  local value = kv.task.read_json(self[option])[self.dataset]
  if type(value) == kind then return value end
  return refuse("%s has no %s for %s", self[option], kind, self.dataset)
end

--- Puts the fields of a row into a template.
local function filled(text, row)
  return (text:gsub("{(%w+)}", { context = row.context, input = row.input }))
end

--- A prompt of at most `most` tokens, as LongBench cuts it: without those of its middle.
local function shortened(tokenizer, text, most)
  local ids, half = tokenizer:encode(text, { eos = false }), math.floor(most / 2)
  if #ids <= most then return text end
  local head, tail = {}, {}
  for i = 1, half do head[i], tail[i] = ids[i], ids[#ids - half + i] end
  return tokenizer:decode(head) .. tokenizer:decode(tail)
end

--- An example: its question is the text after {context}, as far as it is not cut.
local function example_of(self, tokenizer, row, most)
  local after = filled(self.template:match "{context}(.*)$", row)
  local text = shortened(tokenizer, filled(self.template, row), most)
  local question = text:sub(-#after) == after and after ~= "" and after or text:sub(-1)
  local example = self:prompt(tokenizer, { answers = row.answers, question = question,
    context = text:sub(1, #text - #question) })
  example.all_classes, example.answer_tokens = row.all_classes, self.answer_tokens
  return example
end

return kv.task.define {
  name = "longbench",
  takes = { file = kv.task.string, dataset = kv.task.string, prompts = kv.task.string,
            lengths = kv.task.string },
  open = function(self)
    for _, name in ipairs { "file", "dataset", "prompts" } do
      if not self[name] then refuse("%s is missing, expected a string", name) end
    end
    if IN_WORDS[self.dataset] then
      refuse("%s is scored by the words that jieba finds, which is not here",
        self.dataset)
    elseif not SCORES[self.dataset] then
      refuse("dataset is %q, expected one of LongBench's", self.dataset)
    end
    self.template = entry(self, "prompts", "string")
    if not self.template:find("{context}", 1, true) then
      refuse("the prompt of %s has no {context}", self.dataset)
    elseif self.lengths then
      self.answer_tokens = self.answer_tokens or entry(self, "lengths", "number")
    elseif not self.answer_tokens then
      refuse "lengths is missing, expected dataset2maxlen.json; or give answer_tokens"
    end
    self.metric, self.first_line = kv.longbench[SCORES[self.dataset]],
      FIRST_LINE[self.dataset]
    self.chat = self.chat and not NO_CHAT[self.dataset]
    self.rows = kv.task.read_examples(self.file)
  end,

  examples = function(self, tokenizer, n, seed)
    local list = {}
    for i, number in ipairs(kv.task.choose(n, #self.rows, seed)) do
      local most, row = self.length - self.answer_tokens, self.rows[number]
      if most < 2 then refuse("length is %d, too little for answers", self.length) end
      local example = example_of(self, tokenizer, row, most)
      for less = 8, 64, 8 do -- a cut, or the words of a chat, may make it longer
        if #example.ids <= most then break end
        local left = math.max(2, 2 * most - #example.ids - less)
        example = example_of(self, tokenizer, row, left)
      end
      if #example.ids > most then
        refuse("length is %d, and prompt %d is longer with its answer", self.length,
          number)
      end
      list[i] = example
    end
    return list
  end,
}
