# Cross-compiles for aarch64 with Debian's g++-aarch64-linux-gnu, by `make aarch64`: docs/building.md. Shows that the
# sources compile and link there; what runs is built on such a machine, with its own Python's headers.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CUDA_HOST_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR env)  # CMake asks for one to look for a Python, which is this machine's
