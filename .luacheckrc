std = "luajit"
self = false -- a method need not use its object
max_line_length = 90
include_files = { "**/*.lua" }
files["spec"] = { std = "+busted" }
files["premake5.lua"] = { ignore = { "1" } } -- Premake's API is globals
