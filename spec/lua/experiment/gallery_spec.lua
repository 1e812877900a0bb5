--- The gallery's page, and lua/experiments/all.lua with the real executable.
local gallery = require "kvlab.experiment.gallery"
local kv = require "kvlab"
local markup = require "spec.markup"
local files = require "kvlab.files"
local temporary = require "spec.temporary"

local SVG = "<?xml version=\"1.0\"?>\n<svg viewBox=\"0 0 640 480\"><defs><path id='a' "
  .. "d='M0,0'/></defs><use xlink:href='#a'/></svg>"

local folder

local function write(name, text)
  files.make_folder(folder .. "/" .. name:match "^(.*)/")
  files.write(folder .. "/" .. name, text)
end

--- The command's exit status and what it printed.
local function run(words)
  local pipe = io.popen(("'%s' run %s/lua/experiments/all.lua --out='%s' %s 2>&1;"
    .. " echo \"status $?\""):format(kv.paths.executable, kv.paths.root, folder, words))
  local printed, status = pipe:read("*a"):match "^(.*)status (%d+)%s*$"
  pipe:close()
  return tonumber(status), printed
end

describe("gallery #release", function()
  before_each(function() folder = temporary.folder() end)

  it("has a card for each: question, picture, link; or what was printed", function()
    for _, name in ipairs { "01_a", "02_b" } do
      write(name .. "/report.html", "a report")
      write(name .. "/one.svg", SVG)
      write(name .. "/manifest.json", '{"title": "Why ' .. name .. '?", "pictures": '
        .. '["one.svg", "two.svg"]}')
    end
    write("03_c/manifest.json", '{"title": "no picture", "pictures": []}')
    write("03_c/report.html", "a report")
    local page = gallery.html(folder, "All <of> them", "cpu", {
      { name = "01_a", is_done = true, seconds = 1.5, printed = "p" },
      { name = "02_b", is_done = true, seconds = 60, printed = "p" },
      { name = "03_c", is_done = true, seconds = 0, printed = "a & <b>\nfour" },
      { name = "04_d", is_done = true, seconds = 0, printed = "just printed" },
      { name = "02_b", is_done = false, seconds = 0, printed = "it broke" },
    })
    local elements, outer = markup.read(page)
    local count = {}
    for _, e in ipairs(elements) do count[e.name] = (count[e.name] or 0) + 1 end
    assert.same({ 5, 2, 3 }, { count.article, count.svg, count.pre })
    assert.same({ "01_a/report.html", "02_b/report.html", "03_c/report.html" }, outer)
    for _, words in ipairs { "All &lt;of&gt; them", ">Why 01_a?</a>", "01_a · 1.5 s<",
      "a &amp; &lt;b&gt;\nfour</pre>", "02_b · 0.0 s · failed", "it broke</pre>",
      "<h2>04_d</h2>" } do
      assert.truthy(page:find(words, 1, true), words)
    end
  end)

  --- The card of an experiment whose manifest names the first picture in this way.
  local function page_with(picture, svg)
    write("x/report.html", "a report")
    if svg then write("x/one.svg", svg) end
    write("x/manifest.json", '{"title": "t", "pictures": [' .. picture .. "]}")
    return gallery.html(folder, "t", "cpu", { { name = "x", is_done = true, seconds = 0,
      printed = "printed" } })
  end

  it("runs no script", function()
    assert.is_nil(page_with('"one.svg"', SVG):find("script-src", 1, true))
  end)

  it("takes pictures of the experiment's own folder only", function()
    write("y/secret.svg", SVG)
    for _, name in ipairs { '"../y/secret.svg"', '"' .. folder .. '/y/secret.svg"',
                            '"manifest.json"', "7", "{}", '".."' } do
      local page = page_with(name)
      assert.is_nil(page:find("<svg", 1, true), name)
      assert.truthy(page:find("is no name of a picture", 1, true), name)
      assert.truthy(page:find("printed</pre>", 1, true), name)
    end
    assert.truthy(page_with('"none.svg"'):find("none.svg is missing", 1, true))
  end)

  it("shows a picture only if all of it is drawn", function()
    for _, inner in ipairs { "", "<!-- a comment -->", "<use xlink:href='#a'/>",
                             "<g fill=\"a>b\">x</g>", "<text x='1'>a &lt; b</text>" } do
      local page = page_with('"one.svg"', SVG:gsub("</svg>", inner .. "%0"))
      assert.truthy(page:find("<svg", 1, true), inner)
    end
    for _, bad in ipairs {
      "<script>alert(1)</script>", "<g onclick='x()'/>", "<g a='>' OnLoad='x()'/>",
      "<a xlink:href='#a'>x</a>", "<use href='https://x.example/a'/>",
      "<image xlink:href='data:image/png;base64,AAAA'/>", "<style>body{}</style>",
      "<foreignObject><form/></foreignObject>", "<g onload=x()>", "</svg><p>x</p>",
      "<!-- a --!><script>x()</script> -->", "<![CDATA[x]]>", "<g", "</svg>x",
      "<meta http-equiv='refresh' content='0'/>" } do
      local page = page_with('"one.svg"', SVG:gsub("</svg>", bad:gsub("%%", "%%%%")
        .. "%0"))
      assert.is_nil(page:find("<svg", 1, true), bad)
      assert.truthy(page:find("no picture: one.svg", 1, true), bad)
    end
  end)

  local it = kv.paths.executable and it or pending

  it("is made of experiments that ran, each in a folder of its own", function()
    local status, printed = run "--quick --seed=3 00_cached_lm 12_captured"
    assert.equal(0, status, printed)
    local page = assert(files.read(folder .. "/index.html"))
    local _, outer = markup.read(page)
    assert.same({ "12_captured/report.html" }, outer)
    assert.truthy(page:find("seed 3", 1, true))
    assert.truthy(page:find("k_cache [4, 128]", 1, true))
    assert.truthy(page:find("<svg role", 1, true))
    assert.truthy(files.read(folder .. "/12_captured/manifest.json")
      :find('"seed": 3', 1, true))
    markup.read((files.read(folder .. "/12_captured/report.html")))
  end)

  it("shows what failed, goes on, and ends with status 1", function()
    local status, printed = run "--quick --set decode=2 02_offload_bytes 12_captured"
    assert.equal(1, status)
    assert.matches("failed: 02_offload_bytes;", printed)
    local page = assert(files.read(folder .. "/index.html"))
    assert.matches("02_offload_bytes · [%d.]+ s · failed", page)
    assert.matches("nothing is called decode", page)
    assert.matches("12_captured/report.html", page)
  end)

  it("takes experiments by name", function()
    local status, printed = run "--quick 12_capture"
    assert.equal(1, status)
    assert.matches("no experiment 12_capture; did you mean 12_captured%?", printed)
  end)

  it("finds every experiment, whose quick settings are right", function()
    local list = io.popen(("cd '%s/lua/experiments' && ls [0-9]*.lua"):format(
      kv.paths.root))
    for file in list:lines() do
      local pipe = io.popen(("'%s' run %s/lua/experiments/%s --quick --list 2>&1;"
        .. " echo \"status $?\""):format(kv.paths.executable, kv.paths.root, file))
      local printed, status = pipe:read("*a"):match "^(.*)status (%d+)%s*$"
      pipe:close()
      assert.equal("0", status, file .. ": " .. printed)
    end
    list:close()
  end)
end)
