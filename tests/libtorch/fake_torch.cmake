# fake_torch(<folder> <version> <c10's symbol>) writes a folder that passes every check of the find module before the one that
# links a program. If the version is "", it writes no version.h.
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
# A library of the old ABI also contains symbols of the new ABI's strings, which it takes from the C++ library.
set(fake_old_abi "_ZN3c105ErrorC1ENS_14SourceLocationESs _ZGTtNSt11logic_errorC1ERKNSt7__cxx1112basic_string")
