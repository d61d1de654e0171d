# fake_torch(<folder> <version> <c10's symbol>): a folder that the find module takes for a LibTorch, as far as it looks before it
# links. A version of "" writes no version.h.
function(fake_torch folder version symbol)
  file(REMOVE_RECURSE ${folder})
  set(api ${folder}/include/torch/csrc/api/include/torch)
  file(WRITE ${api}/torch.h "")
  if(version)
    string(REPLACE "." ";" parts ${version})
    list(GET parts 0 major)
    list(GET parts 1 minor)
    file(WRITE ${api}/version.h
         "#define TORCH_VERSION_MAJOR ${major}\n#define TORCH_VERSION_MINOR ${minor}\n#define TORCH_VERSION_PATCH 0\n")
  endif()
  file(WRITE ${folder}/lib/libc10.so "${symbol}")
  file(WRITE ${folder}/lib/libtorch_cpu.so "")
endfunction()
set(fake_new_abi "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_string")
# Libraries of the old ABI name strings of the new one too, out of the C++ library.
set(fake_old_abi "_ZN3c105ErrorC1ENS_14SourceLocationESs _ZGTtNSt11logic_errorC1ERKNSt7__cxx1112basic_string")
