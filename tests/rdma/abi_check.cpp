// Compiles only if verbs.hpp has the binary interface of rdma-core: every member that is used at the header's offset,
// every constant with the header's value.

#include <infiniband/verbs.h>

#include "verbs.hpp"

namespace v = ds_ext::verbs;

#define SAME_PLACE(ours, our_member, theirs, their_member)                          \
    static_assert(offsetof(v::ours, our_member) == offsetof(theirs, their_member)); \
    static_assert(sizeof(v::ours::our_member) == sizeof(theirs::their_member))
#define SAME_SIZE(ours, theirs) static_assert(sizeof(v::ours) == sizeof(theirs))

SAME_SIZE(Operations, ibv_context_ops);
SAME_PLACE(Operations, poll_cq, ibv_context_ops, poll_cq);
SAME_PLACE(Operations, req_notify_cq, ibv_context_ops, req_notify_cq);
SAME_PLACE(Operations, post_send, ibv_context_ops, post_send);
SAME_PLACE(Operations, post_recv, ibv_context_ops, post_recv);
SAME_PLACE(Context, ops, ibv_context, ops);
SAME_PLACE(Context, async_fd, ibv_context, async_fd);
SAME_PLACE(Channel, fd, ibv_comp_channel, fd);
SAME_PLACE(MemoryRegion, lkey, ibv_mr, lkey);
SAME_PLACE(MemoryRegion, rkey, ibv_mr, rkey);
SAME_PLACE(CompletionQueue, context, ibv_cq, context);
SAME_PLACE(CompletionQueue, cq_context, ibv_cq, cq_context);
SAME_PLACE(QueuePair, context, ibv_qp, context);
SAME_PLACE(QueuePair, qp_num, ibv_qp, qp_num);
SAME_SIZE(Gid, ibv_gid);

static_assert(sizeof(v::PortAttributes) > sizeof(ibv_port_attr));
SAME_PLACE(PortAttributes, state, ibv_port_attr, state);
SAME_PLACE(PortAttributes, active_mtu, ibv_port_attr, active_mtu);
SAME_PLACE(PortAttributes, max_msg_sz, ibv_port_attr, max_msg_sz);
SAME_PLACE(PortAttributes, lid, ibv_port_attr, lid);

SAME_SIZE(Capacities, ibv_qp_cap);
SAME_PLACE(Capacities, max_inline_data, ibv_qp_cap, max_inline_data);
SAME_SIZE(QueuePairInit, ibv_qp_init_attr);
SAME_PLACE(QueuePairInit, cap, ibv_qp_init_attr, cap);
SAME_PLACE(QueuePairInit, qp_type, ibv_qp_init_attr, qp_type);
SAME_PLACE(QueuePairInit, sq_sig_all, ibv_qp_init_attr, sq_sig_all);

SAME_SIZE(AddressVector, ibv_ah_attr);
SAME_PLACE(AddressVector, grh.sgid_index, ibv_ah_attr, grh.sgid_index);
SAME_PLACE(AddressVector, grh.hop_limit, ibv_ah_attr, grh.hop_limit);
SAME_PLACE(AddressVector, dlid, ibv_ah_attr, dlid);
SAME_PLACE(AddressVector, is_global, ibv_ah_attr, is_global);
SAME_PLACE(AddressVector, port_num, ibv_ah_attr, port_num);
SAME_SIZE(QueuePairAttributes, ibv_qp_attr);
SAME_PLACE(QueuePairAttributes, path_mtu, ibv_qp_attr, path_mtu);
SAME_PLACE(QueuePairAttributes, rq_psn, ibv_qp_attr, rq_psn);
SAME_PLACE(QueuePairAttributes, dest_qp_num, ibv_qp_attr, dest_qp_num);
SAME_PLACE(QueuePairAttributes, qp_access_flags, ibv_qp_attr, qp_access_flags);
SAME_PLACE(QueuePairAttributes, ah_attr, ibv_qp_attr, ah_attr);
SAME_PLACE(QueuePairAttributes, pkey_index, ibv_qp_attr, pkey_index);
SAME_PLACE(QueuePairAttributes, max_dest_rd_atomic, ibv_qp_attr, max_dest_rd_atomic);
SAME_PLACE(QueuePairAttributes, min_rnr_timer, ibv_qp_attr, min_rnr_timer);
SAME_PLACE(QueuePairAttributes, timeout, ibv_qp_attr, timeout);
SAME_PLACE(QueuePairAttributes, rnr_retry, ibv_qp_attr, rnr_retry);

SAME_SIZE(ScatterEntry, ibv_sge);
SAME_PLACE(ScatterEntry, lkey, ibv_sge, lkey);
SAME_SIZE(SendRequest, ibv_send_wr);
SAME_PLACE(SendRequest, opcode, ibv_send_wr, opcode);
SAME_PLACE(SendRequest, imm_data, ibv_send_wr, imm_data);
SAME_PLACE(SendRequest, remote_addr, ibv_send_wr, wr.rdma.remote_addr);
SAME_PLACE(SendRequest, rkey, ibv_send_wr, wr.rdma.rkey);
SAME_SIZE(ReceiveRequest, ibv_recv_wr);
SAME_SIZE(Completion, ibv_wc);
SAME_PLACE(Completion, status, ibv_wc, status);
SAME_PLACE(Completion, opcode, ibv_wc, opcode);
SAME_PLACE(Completion, byte_len, ibv_wc, byte_len);
SAME_PLACE(Completion, imm_data, ibv_wc, imm_data);
SAME_PLACE(Completion, wc_flags, ibv_wc, wc_flags);
SAME_SIZE(AsyncEvent, ibv_async_event);
SAME_PLACE(AsyncEvent, event_type, ibv_async_event, event_type);

static_assert(v::kQptRc == IBV_QPT_RC && v::kQpsInit == IBV_QPS_INIT && v::kQpsRtr == IBV_QPS_RTR);
static_assert(v::kQpsRts == IBV_QPS_RTS);
static_assert(v::kQpState == IBV_QP_STATE && v::kQpAccessFlags == IBV_QP_ACCESS_FLAGS);
static_assert(v::kQpPkeyIndex == IBV_QP_PKEY_INDEX && v::kQpPort == IBV_QP_PORT && v::kQpAv == IBV_QP_AV);
static_assert(v::kQpPathMtu == IBV_QP_PATH_MTU && v::kQpTimeout == IBV_QP_TIMEOUT);
static_assert(v::kQpRetryCnt == IBV_QP_RETRY_CNT && v::kQpRnrRetry == IBV_QP_RNR_RETRY);
static_assert(v::kQpRqPsn == IBV_QP_RQ_PSN && v::kQpSqPsn == IBV_QP_SQ_PSN && v::kQpDestQpn == IBV_QP_DEST_QPN);
static_assert(v::kQpMaxQpRdAtomic == IBV_QP_MAX_QP_RD_ATOMIC && v::kQpMinRnrTimer == IBV_QP_MIN_RNR_TIMER);
static_assert(v::kQpMaxDestRdAtomic == IBV_QP_MAX_DEST_RD_ATOMIC);
static_assert(v::kAccessLocalWrite == IBV_ACCESS_LOCAL_WRITE && v::kAccessRemoteWrite == IBV_ACCESS_REMOTE_WRITE);
static_assert(v::kWrRdmaWrite == IBV_WR_RDMA_WRITE && v::kWrRdmaWriteWithImm == IBV_WR_RDMA_WRITE_WITH_IMM);
static_assert(v::kSendSignaled == IBV_SEND_SIGNALED && v::kSendSolicited == IBV_SEND_SOLICITED);
static_assert(v::kPortActive == IBV_PORT_ACTIVE);
static_assert(v::kWcSuccess == IBV_WC_SUCCESS && v::kWcWrFlushErr == IBV_WC_WR_FLUSH_ERR);
static_assert(v::kWcRecvRdmaWithImm == IBV_WC_RECV_RDMA_WITH_IMM);

int main() {}
