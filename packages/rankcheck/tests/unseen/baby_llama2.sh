# https://github.com/DLLXW/baby-llama2-chinese at 98a20dbb35
# rankcheck --launcher torchrun /CLONE/pretrain.py
# In a folder with data/pretrain_data.bin: 2560 random uint16 below 200
cd /CLONE
ed -s pretrain.py <<'END'
289s/else 4/else 1/
202s/80000/60/
201s/1000/2/
189s/8/2/
188s/8/1/
187s/512/32/
186s/512/16/
184s/32/4/
177s/10000/10/
176s/100/5/
174s/1/3/
137s/64793/256/
2s/'0'/'0,1'/
w
END
ed -s dataset.py <<'END'
3s/.*//
w
END
