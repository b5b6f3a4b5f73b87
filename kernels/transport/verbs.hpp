#pragma once

// libibverbs, loaded at run time, so that the build needs no header and runs on hosts without the library. The types
// below are the used part of the binary interface IBVERBS_1.1, which has not changed since 2008. If the library
// allocates an object, unused members at its end are omitted. tests/rdma/abi_check.cpp compares each offset and
// constant with the header of rdma-core.

#include <dlfcn.h>
#include <pthread.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace ds_ext::verbs {

struct CompletionQueue;
struct QueuePair;
struct Completion;
struct SendRequest;
struct ReceiveRequest;
struct Device;
struct Domain;

/// Entries of ibv_context_ops that the inline functions of the header call.
struct Operations {
    void* unused_before_poll[11];
    int (*poll_cq)(CompletionQueue*, int, Completion*);
    int (*req_notify_cq)(CompletionQueue*, int solicited_only);
    void* unused_before_post[12];
    int (*post_send)(QueuePair*, SendRequest*, SendRequest** bad);
    int (*post_recv)(QueuePair*, ReceiveRequest*, ReceiveRequest** bad);
    void* unused_at_end[5];
};

struct Context {
    Device* device;
    Operations ops;
    int cmd_fd, async_fd, num_comp_vectors;
};

struct Channel {
    Context* context;
    int fd, refcnt;
};

struct MemoryRegion {
    Context* context;
    Domain* domain;
    void* addr;
    std::size_t length;
    std::uint32_t handle, lkey, rkey;
};

struct CompletionQueue {
    Context* context;
    Channel* channel;
    void* cq_context;
    std::uint32_t handle;
    int cqe;
};

struct QueuePair {
    Context* context;
    void* qp_context;
    Domain* domain;
    CompletionQueue *send_cq, *recv_cq;
    void* srq;
    std::uint32_t handle, qp_num;
};

struct alignas(8) Gid {
    std::uint8_t raw[16];
};

/// Larger than ibv_port_attr of any version, whose first members are read.
struct PortAttributes {
    std::uint32_t state, max_mtu, active_mtu;
    std::int32_t gid_tbl_len;
    std::uint32_t port_cap_flags, max_msg_sz, bad_pkey_cntr, qkey_viol_cntr;
    std::uint16_t pkey_tbl_len, lid, sm_lid;
    std::uint8_t rest[256];
};

struct Capacities {
    std::uint32_t max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data;
};

struct QueuePairInit {
    void* qp_context;
    CompletionQueue *send_cq, *recv_cq;
    void* srq;
    Capacities cap;
    std::uint32_t qp_type;
    int sq_sig_all;
};

struct AddressVector {
    struct {
        Gid dgid;
        std::uint32_t flow_label;
        std::uint8_t sgid_index, hop_limit, traffic_class;
    } grh;
    std::uint16_t dlid;
    std::uint8_t sl, src_path_bits, static_rate, is_global, port_num;
};

struct QueuePairAttributes {
    std::uint32_t qp_state, cur_qp_state, path_mtu, path_mig_state, qkey, rq_psn, sq_psn, dest_qp_num, qp_access_flags;
    Capacities cap;
    AddressVector ah_attr, alt_ah_attr;
    std::uint16_t pkey_index, alt_pkey_index;
    std::uint8_t en_sqd_async_notify, sq_draining, max_rd_atomic, max_dest_rd_atomic, min_rnr_timer, port_num, timeout,
        retry_cnt, rnr_retry, alt_port_num, alt_timeout;
    std::uint32_t rate_limit;
};

struct ScatterEntry {
    std::uint64_t addr;
    std::uint32_t length, lkey;
};

struct SendRequest {
    std::uint64_t wr_id;
    SendRequest* next;
    ScatterEntry* sg_list;
    int num_sge;
    std::uint32_t opcode, send_flags, imm_data;  // imm_data in network byte order
    std::uint64_t remote_addr;
    std::uint32_t rkey;
    std::uint8_t other_operations[76];
};

struct ReceiveRequest {
    std::uint64_t wr_id;
    ReceiveRequest* next;
    ScatterEntry* sg_list;
    int num_sge;
};

struct Completion {
    std::uint64_t wr_id;
    std::uint32_t status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags;
    std::uint16_t pkey_index, slid;
    std::uint8_t sl, dlid_path_bits;
};

struct AsyncEvent {
    void* element;
    std::uint32_t event_type;
};

// Constants, named as in the header without IBV_.
inline constexpr std::uint32_t kQptRc = 2, kQpsInit = 1, kQpsRtr = 2, kQpsRts = 3;
inline constexpr int kQpState = 1 << 0, kQpAccessFlags = 1 << 3, kQpPkeyIndex = 1 << 4, kQpPort = 1 << 5,
                     kQpAv = 1 << 7, kQpPathMtu = 1 << 8, kQpTimeout = 1 << 9, kQpRetryCnt = 1 << 10,
                     kQpRnrRetry = 1 << 11, kQpRqPsn = 1 << 12, kQpMaxQpRdAtomic = 1 << 13, kQpMinRnrTimer = 1 << 15,
                     kQpSqPsn = 1 << 16, kQpMaxDestRdAtomic = 1 << 17, kQpDestQpn = 1 << 20;
inline constexpr int kAccessLocalWrite = 1, kAccessRemoteWrite = 2;
inline constexpr std::uint32_t kWrRdmaWrite = 0, kWrRdmaWriteWithImm = 1, kSendSignaled = 2, kSendSolicited = 4;
inline constexpr std::uint32_t kWcSuccess = 0, kWcWrFlushErr = 5, kWcRecvRdmaWithImm = 129, kPortActive = 4;

/// RDMA cannot be used on this host, or a call of libibverbs has failed.
class VerbsError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

/// Functions of libibverbs. DS_EXT_IBVERBS overrides the file.
class Library {
  public:
    /// Return the library, which the first call loads. VerbsError: it is missing or too old.
    static const Library& get() {
        static const Library library;
        return library;
    }

    Device** (*get_device_list)(int*);
    void (*free_device_list)(Device**);
    const char* (*get_device_name)(Device*);
    Context* (*open_device)(Device*);
    int (*close_device)(Context*);
    int (*query_port)(Context*, std::uint8_t port, PortAttributes*);
    int (*query_gid)(Context*, std::uint8_t port, int index, Gid*);
    Domain* (*alloc_pd)(Context*);
    int (*dealloc_pd)(Domain*);
    MemoryRegion* (*reg_mr)(Domain*, void*, std::size_t, int access);
    int (*dereg_mr)(MemoryRegion*);
    Channel* (*create_comp_channel)(Context*);
    int (*destroy_comp_channel)(Channel*);
    CompletionQueue* (*create_cq)(Context*, int entries, void* context, Channel*, int vector);
    int (*destroy_cq)(CompletionQueue*);
    int (*get_cq_event)(Channel*, CompletionQueue**, void** context);
    void (*ack_cq_events)(CompletionQueue*, unsigned count);
    int (*get_async_event)(Context*, AsyncEvent*);
    void (*ack_async_event)(AsyncEvent*);
    QueuePair* (*create_qp)(Domain*, QueuePairInit*);
    int (*modify_qp)(QueuePair*, QueuePairAttributes*, int mask);
    int (*destroy_qp)(QueuePair*);
    const char* (*wc_status_str)(std::uint32_t status);

  private:
    Library() {
        const char* file = std::getenv("DS_EXT_IBVERBS");
        const std::string name = file != nullptr && *file != '\0' ? file : "libibverbs.so.1";
        void* handle = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) {
            const char* error = dlerror();
            throw VerbsError("libibverbs: cannot be loaded (" + (error != nullptr ? error : name) +
                             "). Install rdma-core (Debian, Ubuntu: apt install libibverbs1 ibverbs-providers)");
        }
        const auto find = [&](auto& function, const char* symbol) {
            void* address = dlsym(handle, symbol);
            if (address == nullptr) throw VerbsError(name + ": no symbol " + symbol + ". Install a newer rdma-core");
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
        };
        find(get_device_list, "ibv_get_device_list");
        find(free_device_list, "ibv_free_device_list");
        find(get_device_name, "ibv_get_device_name");
        find(open_device, "ibv_open_device");
        find(close_device, "ibv_close_device");
        find(query_port, "ibv_query_port");
        find(query_gid, "ibv_query_gid");
        find(alloc_pd, "ibv_alloc_pd");
        find(dealloc_pd, "ibv_dealloc_pd");
        find(reg_mr, "ibv_reg_mr");
        find(dereg_mr, "ibv_dereg_mr");
        find(create_comp_channel, "ibv_create_comp_channel");
        find(destroy_comp_channel, "ibv_destroy_comp_channel");
        find(create_cq, "ibv_create_cq");
        find(destroy_cq, "ibv_destroy_cq");
        find(get_cq_event, "ibv_get_cq_event");
        find(ack_cq_events, "ibv_ack_cq_events");
        find(get_async_event, "ibv_get_async_event");
        find(ack_async_event, "ibv_ack_async_event");
        find(create_qp, "ibv_create_qp");
        find(modify_qp, "ibv_modify_qp");
        find(destroy_qp, "ibv_destroy_qp");
        find(wc_status_str, "ibv_wc_status_str");
    }
};

}  // namespace ds_ext::verbs
