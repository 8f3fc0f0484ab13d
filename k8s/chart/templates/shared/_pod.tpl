{{/* One pod of a service; in addition to "root" and "service":
  "command": command line of the container
  "isWorker": a pod of a group that has no rank 0, and so no gRPC server
*/}}
{{- define "draftwire.podTemplate" -}}
{{- $values := index .root.Values .service -}}
metadata:
  labels:
    {{- /* No version labels: a new chart version alone must not restart a pod with a large model. */}}
    {{- include "draftwire.selector" . | nindent 4 }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $values.podAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "draftwire.name" . }}
  automountServiceAccountToken: {{ and (eq .service "gateway") (eq .root.Values.discovery "kubernetes") }}
  # Links would set variables such as DRAFTWIRE_GATEWAY_PORT=tcp://..., which the services parse as options.
  enableServiceLinks: false
  # Ranks are released after the drain: 10 s for the current step and 6 s to end.
  terminationGracePeriodSeconds: {{ add (ceil $values.drainSeconds) ($values.preStopSeconds | default 0) 30 }}
  securityContext:
    {{- include "draftwire.podSecurity" . | nindent 4 }}
  {{- with .root.Values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with $values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- $own := dict "labelSelector" (dict "matchLabels" (include "draftwire.selector" $ | fromYaml)) }}
    {{- range . }}
    - {{ merge (deepCopy .) $own | toYaml | nindent 6 | trim }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .service }}
      image: {{ include "draftwire.image" . }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      command: {{ .command | toJson }}
      env:
        {{- include "draftwire.environment" . | trim | nindent 8 }}
      {{- if not .isWorker }}
      ports:
        - {name: grpc, containerPort: {{ include "draftwire.port" . }}}
        {{- if eq .service "gateway" }}
        - {name: http, containerPort: 8000}
        {{- end }}
        - {name: metrics, containerPort: {{ include "draftwire.metricsPort" . }}}
      {{- include "draftwire.probes" . | nindent 6 }}
      {{- end }}
      {{- with $values.preStopSeconds }}
      lifecycle:
        preStop: {sleep: {seconds: {{ . }}}}
      {{- end }}
      resources:
        {{- include "draftwire.resources" . | nindent 8 }}
      securityContext:
        {{- include "draftwire.containerSecurity" . | nindent 8 }}
      volumeMounts:
        {{- include "draftwire.mounts" . | trim | nindent 8 }}
  volumes:
    {{- include "draftwire.volumes" . | trim | nindent 4 }}
{{- end }}

{{- define "draftwire.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "draftwire.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "draftwire.resources" -}}
{{- $values := index .root.Values .service -}}
{{- $resources := deepCopy $values.resources -}}
{{- if eq (get $values "device") "cuda" -}}
{{- $gpus := dict .root.Values.gpuResource (include "draftwire.ranks" . | int) -}}
{{- $_ := set $resources "limits" (merge $gpus (get $resources "limits" | default dict)) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end }}

{{/* Of the metrics port, over plain HTTP: a probe starts nothing in the container. A call on the device that hangs fails
both, and only a restart helps. While the model loads, only the startup probe counts. */}}
{{- define "draftwire.probes" -}}
{{- $startup := include "draftwire.startupSeconds" . | int -}}
startupProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: {{ div (add $startup 4) 5 }}
readinessProbe:
  httpGet: {path: /readyz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /livez, port: metrics}
  periodSeconds: 15
  timeoutSeconds: 5
  failureThreshold: 3
{{- end }}

{{- define "draftwire.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .root.Values.tls.enabled }}
- {name: tls, mountPath: /etc/draftwire/tls, readOnly: true}
{{- end }}
{{- if eq .service "gateway" }}
{{- if .root.Values.tokens.secret }}
- {name: tokens, mountPath: /etc/draftwire/tokens, readOnly: true}
{{- end }}
{{- else }}
{{- if .root.Values.models.volume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- if .root.Values.models.hub.enabled }}
- {name: hub, mountPath: /hub}
{{- end }}
{{- if gt (include "draftwire.ranks" . | int) 1 }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- end }}
{{- end }}

{{/* Secrets are mounted as folders, not by subPath, so that files change with the Secret and are reloaded. */}}
{{- define "draftwire.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if .root.Values.tls.enabled }}
- name: tls
  secret: {secretName: {{ include "draftwire.tlsSecret" . }}, defaultMode: 0440}
{{- end }}
{{- if eq .service "gateway" }}
{{- with .root.Values.tokens.secret }}
- name: tokens
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- else }}
{{- with .root.Values.models.volume }}
- name: models
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.models.hub }}
{{- if .enabled }}
- name: hub
  {{- .cache | default (dict "emptyDir" dict) | toYaml | nindent 2 }}
{{- end }}
{{- end }}
{{- if gt (include "draftwire.ranks" . | int) 1 }}
# NCCL's ranks communicate through it; a container's default has 64 MiB.
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ get (index .root.Values .service) "sharedMemory" }}}
{{- end }}
{{- end }}
{{- end }}
