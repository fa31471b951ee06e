# Makes C of PTX, for `sed -Ez`: registers become arrays, and instructions macros of ptx.h. For instance,
#	@%p1 ld.global.v2.u16 {%rs1, %rs2}, [%rd3+4];   becomes   if (p[1]) ptx_ld_global_v2(u16, rs[1], rs[2], rd[3]+4);
# Lines keep their numbers. What is beyond the subset that clang makes of gpuingest/cuda/kernel becomes C that does not compile.
s|//[^\n]*||g
s/\.(version|target|address_size) [^\n]*//g
s/\.visible|\.pragma [^;]*;//g
s/\.shared( \.align [0-9]+)? \.(\w+) (\w+)\[([0-9]+)\];/SHARED(\2, \3, \4)/g

# A kernel's parameters become the fields of a struct, and between <( )> the statements that fill it.
s/\.entry (\w+)\(([^)]*)\)/KERNEL(\1, \2 , <(\2)>)/g
:gather
s/<\(([^>]*)\.param \.\w+ (\w+),?/<(\1 GATHER(\2)/
t gather
s/<\(|\)>//g
s/\.param \.(\w+) (\w+),?/\1 \2;/g

s/[][]|\{(%[^}]*)\}/\1/g
s/\.reg \.(\w+)(\s+)%(\w+)<([0-9]+)>;/\1\2\3[\4];/g
s/@(!?)(%\w+)/if (\1\2)/g
s/\bbra(\.uni)?(\s+\w+;)/goto\2/g
s/\bret;/return;/g

# The last suffix of an instruction, its type, becomes the first argument.
:suffix
s/\b([a-z][a-z0-9_]*)\.([a-z0-9]+)\./\1_\2./g
t suffix
s/\b([a-z][a-z0-9_]*)\.([a-z0-9]+)\s+([^;]+);/ptx_\1(\2, \3);/g
s/%(n?tid|n?ctaid)\./here->\1./g
s/%([a-z]+)([0-9]+)/\1[\2]/g
